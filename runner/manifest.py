def read(d): return None
