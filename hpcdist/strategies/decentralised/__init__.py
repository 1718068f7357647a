"""Parts of strategies without servers: random peers, mixing, compressed mixing."""
