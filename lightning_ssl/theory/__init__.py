"""What the papers solve or simulate: linear dynamics, latent trees, mixtures, the ring."""
