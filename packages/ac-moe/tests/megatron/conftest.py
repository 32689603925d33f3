import importlib.util

# Megatron-core is a dependency, but where it cannot be installed the rest can still be tested. It is looked for and not
# imported: the rank processes import it, after they have put the reference in the place of DeepEP.
collect_ignore_glob = [] if importlib.util.find_spec("megatron.core") else ["test_*.py"]
