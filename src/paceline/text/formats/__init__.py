"""Chat formats: how families of models write thoughts and tool calls, and which one a template writes."""
