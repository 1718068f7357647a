"""Parts of compressors: error feedback, indices, sparse messages, sums over the ranks."""
