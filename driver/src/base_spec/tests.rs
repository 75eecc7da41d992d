use std::{fs, os::unix::fs::symlink, path::Path};

use super::*;

const GPU: &str = "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";
const OTHER: &str = "GPU-00000000-0000-0000-0000-000000000001";

fn gpu(uuid: &str, minor: Option<u32>) -> BaseDevice {
    BaseDevice { gpu: GpuUuid::new(uuid).expect("a UUID"), minor }
}

/// Creates a driver root with the layout of a distribution with `/usr/lib64` and alternatives.
fn driver_root(root: &Path) {
    let file = |path: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, "").expect("a file");
    };
    file("usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05");
    file("usr/lib/x86_64-linux-gnu/libnvidia-container.so.1");
    file("usr/lib/x86_64-linux-gnu/libc.so.6");
    file("usr/share/nvidia/profile");
    file("etc/alternatives/libnvidia-ml.real");
    let link = |target: &str, path: &str| symlink(target, root.join(path)).expect("a link");
    link("libcuda.so.580.95.05", "usr/lib/x86_64-linux-gnu/libcuda.so.1");
    link("/etc/alternatives/libnvidia-ml.real", "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
    link("nowhere", "usr/lib/x86_64-linux-gnu/libnvidia-cfg.so.1");
    link("libnvidia-loop.so", "usr/lib/x86_64-linux-gnu/libnvidia-loop.so");
    link("lib/x86_64-linux-gnu", "usr/lib64");
}

fn base_spec(directory: &Path) -> (BaseSpec, SpecStore) {
    let root = directory.join("root");
    driver_root(&root);
    let store = SpecStore::new(directory.join("cdi"));
    (BaseSpec::new(store.clone(), DriverRoot::new(root, "/on/the/host")), store)
}

fn written(store: &SpecStore) -> Spec {
    store.read(&SpecFile::for_kind(kind())).expect("readable").expect("written")
}

#[test]
fn mounts_libraries_with_links_resolved_below_root() {
    let directory = tempfile::tempdir().expect("a directory");
    let (base, store) = base_spec(directory.path());
    base.update(&[gpu(GPU, Some(0))], &BTreeSet::new()).expect("written");

    let mounts: Vec<_> = written(&store)
        .container_edits
        .mounts
        .into_iter()
        .map(|mount| {
            assert_eq!(mount.options, ["ro", "bind", "rprivate", "nosuid", "nodev"]);
            (mount.host_path.display().to_string(), mount.container_path.display().to_string())
        })
        .collect();
    let libraries = "usr/lib/x86_64-linux-gnu";
    assert_eq!(
        mounts,
        [
            (
                format!("/on/the/host/{libraries}/libcuda.so.580.95.05"),
                format!("/{libraries}/libcuda.so.1")
            ),
            (
                format!("/on/the/host/{libraries}/libcuda.so.580.95.05"),
                format!("/{libraries}/libcuda.so.580.95.05")
            ),
            (
                "/on/the/host/etc/alternatives/libnvidia-ml.real".into(),
                format!("/{libraries}/libnvidia-ml.so.1")
            ),
            ("/on/the/host/usr/share/nvidia".into(), "/usr/share/nvidia".into()),
        ]
    );
}

#[test]
fn every_gpu_is_a_device_without_legacy_devices() {
    let directory = tempfile::tempdir().expect("a directory");
    let (base, store) = base_spec(directory.path());
    base.update(&[gpu(GPU, Some(0)), gpu(OTHER, None)], &BTreeSet::new()).expect("written");

    let names: Vec<_> =
        written(&store).devices.iter().map(|device| device.name.to_string()).collect();
    assert_eq!(names, [OTHER, GPU]);
    for device in written(&store).devices {
        assert_eq!(device.container_edits.env, ["NVIDIA_VISIBLE_DEVICES=void"]);
        assert!(device.container_edits.device_nodes.is_empty(), "this root has none");
    }
}

#[test]
fn device_gets_only_the_node_of_its_gpu() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().join("root");
    fs::create_dir_all(root.join("dev")).expect("a directory");
    // Links to a character device: mknod(2) needs privileges.
    for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"] {
        symlink("/dev/null", root.join("dev").join(name)).expect("a link");
    }
    fs::write(root.join("dev/nvidia-modeset"), "").expect("no device");
    let store = SpecStore::new(directory.path().join("cdi"));
    let base = BaseSpec::new(store.clone(), DriverRoot::new(&root, "/"));
    base.update(&[gpu(GPU, Some(1))], &BTreeSet::new()).expect("written");

    let paths = |edits: &ContainerEdits| -> Vec<String> {
        edits.device_nodes.iter().map(|node| node.path.display().to_string()).collect()
    };
    let spec = written(&store);
    assert_eq!(paths(&spec.container_edits), ["/dev/nvidia-uvm", "/dev/nvidiactl"]);
    assert_eq!(paths(&spec.devices[0].container_edits), ["/dev/nvidia1"]);
}

#[test]
fn missing_gpu_of_claim_stays_in_the_spec() {
    let directory = tempfile::tempdir().expect("a directory");
    let (base, store) = base_spec(directory.path());
    base.update(&[gpu(GPU, Some(0)), gpu(OTHER, Some(1))], &BTreeSet::new()).expect("written");

    let kept = BTreeSet::from([GpuUuid::new(GPU).expect("a UUID")]);
    base.update(&[], &kept).expect("written");
    let names: Vec<_> =
        written(&store).devices.iter().map(|device| device.name.to_string()).collect();
    assert_eq!(names, [GPU]);

    base.update(&[], &BTreeSet::new()).expect("removed");
    assert_eq!(store.read(&SpecFile::for_kind(kind())).expect("readable"), None);
}

#[test]
fn removed_file_is_restored() {
    let directory = tempfile::tempdir().expect("a directory");
    let (base, store) = base_spec(directory.path());
    base.update(&[gpu(GPU, Some(0))], &BTreeSet::new()).expect("written");
    let before = written(&store);

    store.remove(&SpecFile::for_kind(kind())).expect("removed");
    base.ensure().expect("written");
    assert_eq!(written(&store), before);
}

#[test]
fn foreign_file_prevents_prepare() {
    let directory = tempfile::tempdir().expect("a directory");
    let (base, store) = base_spec(directory.path());
    let path = store.path(&SpecFile::for_kind(kind()));
    fs::create_dir_all(directory.path().join("cdi")).expect("a directory");
    fs::write(&path, r#"{"kind": "nvidia.com/gpu"}"#).expect("written");

    base.update(&[gpu(GPU, Some(0))], &BTreeSet::new()).expect_err("it is foreign");
    assert!(matches!(base.ensure(), Err(StoreError::NotManaged { .. })));
    fs::remove_file(&path).expect("removed");
    base.ensure().expect("written");
    assert_eq!(written(&store).devices.len(), 1);
}

#[test]
fn reports_host_path_of_root_without_libcuda() {
    let directory = tempfile::tempdir().expect("a directory");
    let (base, _) = base_spec(directory.path());
    assert_eq!(base.root_without_cuda(), None);
    fs::remove_file(directory.path().join("root/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"))
        .expect("removed");
    assert_eq!(
        base.root_without_cuda().as_deref(),
        Some("/on/the/host"),
        "a link to nothing is no library"
    );
}
