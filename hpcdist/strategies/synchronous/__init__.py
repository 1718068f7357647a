"""Parts of strategies whose ranks average jointly: buckets, periods, providers."""
