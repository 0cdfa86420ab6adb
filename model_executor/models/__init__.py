"""Model families, one small file each."""
