//! The fake world: GPUs, links, time, from one YAML file.
