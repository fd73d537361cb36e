"""Generation of experience: how a request is served, in the train process or elsewhere."""
