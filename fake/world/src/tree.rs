//! What a machine with these GPUs has on disk: its PCI devices in sysfs, and the files of the NVIDIA driver.
