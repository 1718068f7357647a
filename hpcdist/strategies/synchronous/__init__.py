"""Parts of strategies whose ranks average together: buckets, periods, providers."""
