use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

fn device() -> PciBusId {
    PciBusId::new("00000000:19:00.0").unwrap()
}

/// Returns a sysfs with the device below a bridge.
fn sysfs(host_bridge: &str, node: Option<&str>) -> TempDir {
    let root = TempDir::new().unwrap();
    let relative = format!("devices/{host_bridge}/0000:16:01.0/0000:19:00.0");
    let links = root.path().join("bus/pci/devices");
    fs::create_dir_all(root.path().join(&relative)).unwrap();
    fs::create_dir_all(&links).unwrap();
    symlink(Path::new("../../..").join(&relative), links.join("0000:19:00.0")).unwrap();
    if let Some(node) = node {
        fs::write(root.path().join(relative).join("numa_node"), node).unwrap();
    }
    root
}

#[test]
fn reads_pcie_root_and_numa_node() {
    let root = sysfs("pci0000:16", Some("1\n"));
    let expected = Place { pcie_root: "pci0000:16".to_owned(), numa_node: Some(1) };
    assert_eq!(place(root.path(), &device()).unwrap(), expected);
}

#[test]
fn returns_no_numa_node_without_numa() {
    for node in [Some("-1\n"), None] {
        let root = sysfs("pci0000:16", node);
        assert_eq!(place(root.path(), &device()).unwrap().numa_node, None);
    }
}

#[test]
fn missing_device_error_names_device_and_flag() {
    let root = TempDir::new().unwrap();
    let error = place(root.path(), &device()).unwrap_err().to_string();
    assert!(error.contains("0000:19:00.0") && error.contains("--sysfs-root"), "{error}");
}

#[test]
fn rejects_path_without_host_bridge() {
    let root = sysfs("platform", Some("0"));
    assert!(matches!(place(root.path(), &device()), Err(SysfsError::NoRoot { .. })));
}

#[test]
fn invalid_numa_node_error_shows_content() {
    let root = sysfs("pci0000:16", Some("zero"));
    let error = place(root.path(), &device()).unwrap_err().to_string();
    assert!(error.contains("`zero`"), "{error}");
}
