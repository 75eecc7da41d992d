//! The effect of CDI devices on a container.

use std::{collections::BTreeMap, path::Path};

use container_device_interface::{
    cache::{Cache, CdiOption},
    spec_dirs::with_spec_dirs,
};
use oci_spec::runtime as oci;
use tessera_proto::dra_v1;

/// Returns the OCI spec of a container with these CDI devices, as the crate
/// `container-device-interface` creates it.
pub fn inject(cdi_dir: &Path, devices: &[dra_v1::Device]) -> oci::Spec {
    let mut cache = Cache::default();
    let options: Vec<CdiOption> = vec![with_spec_dirs(&[cdi_dir.to_str().expect("UTF-8")])];
    cache.configure(options);
    cache.refresh().expect("specs without errors");
    let ids = devices.iter().flat_map(|device| device.cdi_device_ids.clone()).collect();
    let mut container = oci::Spec::default();
    cache.inject_devices(Some(&mut container), ids).expect("injection");
    container
}

/// Returns the source of each bind mount, and true if it is read-only, by its path in the
/// container.
pub fn mounts(container: &oci::Spec) -> BTreeMap<String, (String, bool)> {
    let mounts = container.mounts().clone().unwrap_or_default();
    let bound = mounts
        .iter()
        .filter(|mount| mount.options().iter().flatten().any(|option| option == "bind"));
    bound
        .map(|mount| {
            let source = mount.source().clone().expect("a source").display().to_string();
            let read_only = mount.options().iter().flatten().any(|option| option == "ro");
            (mount.destination().display().to_string(), (source, read_only))
        })
        .collect()
}
