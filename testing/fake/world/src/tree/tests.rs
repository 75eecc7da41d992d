use tempfile::TempDir;

use super::*;

fn world(text: &str) -> World {
    World::parse(text, "test").unwrap()
}

#[test]
fn sysfs_path_of_gpu_has_root_and_bridges() {
    let root = TempDir::new().unwrap();
    let world = world(crate::shipped::DGX_1V);
    write_sysfs(&world, root.path()).unwrap();
    write_sysfs(&world, root.path()).unwrap();
    let links = root.path().join("bus/pci/devices");
    let gpu = fs::canonicalize(links.join("0000:0b:00.0")).unwrap();
    let expected = "devices/pci0000:00/0000:00:03.0/0000:08:00.0/0000:09:10.0/0000:0b:00.0";
    assert_eq!(gpu, fs::canonicalize(root.path()).unwrap().join(expected));
    assert_eq!(fs::read_to_string(gpu.join("vendor")).unwrap(), "0x10de\n");
    assert_eq!(fs::read_to_string(links.join("0000:89:00.0/numa_node")).unwrap(), "1\n");
    assert!(links.join("0000:08:00.0/class").exists(), "bridges are devices");
}

#[test]
fn numa_node_without_numa_is_minus_one() {
    let root = TempDir::new().unwrap();
    write_sysfs(&world(crate::shipped::T4_1), root.path()).unwrap();
    let node =
        fs::read_to_string(root.path().join("bus/pci/devices/0000:00:1e.0/numa_node")).unwrap();
    assert_eq!(node, "-1\n");
}

#[test]
fn driver_root_has_libraries_links_world_and_state() {
    let directory = TempDir::new().unwrap();
    let (library, file) = (directory.path().join("lib"), directory.path().join("w.yaml"));
    fs::write(&library, "library").unwrap();
    let libraries = Libraries { nvml: library.clone(), cuda: Some(library) };
    let root = directory.path().join("root");
    for version in ["535.261.02", "535.261.03"] {
        fs::write(&file, crate::shipped::T4_1.replace("535.261.03", version)).unwrap();
        write_driver_root(&file, &World::load(&file).unwrap(), &libraries, &root).unwrap();
    }
    let link = |name: &str| fs::read_link(root.join(LIBRARY_DIRECTORY).join(name)).unwrap();
    assert_eq!(link("libcuda.so.1"), Path::new("libcuda.so.535.261.03"));
    assert_eq!(link("libnvidia-ml.so"), Path::new("libnvidia-ml.so.1"));
    assert_eq!(
        fs::read_to_string(root.join(LIBRARY_DIRECTORY).join("libnvidia-ml.so")).unwrap(),
        "library"
    );
    World::load(&root.join(WORLD_IN_DRIVER_ROOT)).unwrap();
    let share = root.join("usr/share/nvidia/tessera-fake");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&share.join("state")), 0o1777);
    // Independent of the umask and of the modes of the copied files.
    assert_eq!((mode(&share), mode(&root.join(WORLD_IN_DRIVER_ROOT))), (0o755, 0o644));
    assert_eq!(
        (mode(&root.join("usr")), mode(&root.join(LIBRARY_DIRECTORY).join("libcuda.so"))),
        (0o755, 0o755)
    );
    assert_eq!(fs::read_dir(root.join(LIBRARY_DIRECTORY)).unwrap().count(), 6);
}
