"""What ``terapipe doctor`` looks at, a file for each subject.

A check is a function of what was found, which returns findings and changes nothing. Only
``libraries.py`` imports torch, DeepSpeed and megatron-core, and lives with their absence.
"""
