"""A language model over the OpenAI protocol: questions in, checked answers out, each paid once and logged."""
