def run_branches(composer, parsed, *, processes): raise NotImplementedError
