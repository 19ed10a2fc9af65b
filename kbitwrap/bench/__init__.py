"""The benchmark: PEFT's preparation and each precision, on the same model, each in a process of its own.

``settings`` says what is measured, ``models`` builds the model, ``memory`` reads the
peaks, ``case`` measures one case, with ``steps`` and ``exports``, ``runner`` runs them
all, ``loss`` trains adapters and compares their losses, ``rollout`` compares them with
what an engine serves, ``report`` lays the figures out, ``plot`` draws them. Uses the public names of the package only.
"""
