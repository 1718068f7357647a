"""What strategies of one family share; the strategies themselves are the files beside this folder."""
