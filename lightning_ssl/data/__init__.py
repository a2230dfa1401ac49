"""DataModules: images with batched augmentation, and the theory's synthetic models."""
