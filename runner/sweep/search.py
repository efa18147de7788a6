def run_search(composer, parsed, *, processes): raise NotImplementedError
