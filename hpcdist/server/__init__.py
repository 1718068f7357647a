"""What the parameter-server strategies share: the mailbox of gradients."""
