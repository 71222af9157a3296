"""How many tokens each request drafts in a step: the policies, without torch and without drafters."""
