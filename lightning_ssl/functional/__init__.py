"""The papers' quantities as pure functions: tensors in, tensors out."""
