"""Parts of topologies, and their description: edges, weights, spectra, drawings."""
