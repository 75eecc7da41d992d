//! What GPU hardware is there: the GpuLibrary trait, NVML, sysfs.
