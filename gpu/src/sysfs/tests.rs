use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

fn device() -> PciBusId {
    PciBusId::new("00000000:19:00.0").unwrap()
}

/// A sysfs with the device below a bridge.
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
fn root_and_node_come_from_the_path_and_the_file() {
    let root = sysfs("pci0000:16", Some("1\n"));
    let expected = Place { pcie_root: "pci0000:16".to_owned(), numa_node: Some(1) };
    assert_eq!(place(root.path(), &device()).unwrap(), expected);
}

#[test]
fn no_numa_is_no_node() {
    for node in [Some("-1\n"), None] {
        let root = sysfs("pci0000:16", node);
        assert_eq!(place(root.path(), &device()).unwrap().numa_node, None);
    }
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let root = TempDir::new().unwrap();
    let error = place(root.path(), &device()).unwrap_err().to_string();
    assert!(error.contains("0000:19:00.0") && error.contains("--sysfs-root"), "{error}");
}

#[test]
fn a_path_without_a_host_bridge_is_refused() {
    let root = sysfs("platform", Some("0"));
    assert!(matches!(place(root.path(), &device()), Err(SysfsError::NoRoot { .. })));
}

#[test]
fn a_node_that_is_no_number_is_shown() {
    let root = sysfs("pci0000:16", Some("zero"));
    let error = place(root.path(), &device()).unwrap_err().to_string();
    assert!(error.contains("`zero`"), "{error}");
}
