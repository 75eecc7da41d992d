use std::fs;

use tempfile::TempDir;

use super::*;

#[test]
fn library_finds_world_of_its_driver_root() {
    let root = TempDir::new().unwrap();
    let world = root.path().join(WORLD_IN_DRIVER_ROOT);
    fs::create_dir_all(world.parent().unwrap()).unwrap();
    fs::write(&world, "").unwrap();
    for library in ["usr/lib64/libcuda.so.1", "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"] {
        assert_eq!(world_above(&root.path().join(library)), Some(world.clone()));
    }
}

#[test]
fn control_and_state_are_beside_world() {
    let root = TempDir::new().unwrap();
    let world = root.path().join("world.yaml");
    fs::write(&world, "").unwrap();
    let location = Location::of_world(&world, None).unwrap();
    assert_eq!(location.control, root.path().join("control.yaml"));
    assert_eq!(location.state, StatePlace::Shared(root.path().join("state")));
    let elsewhere = root.path().join("elsewhere");
    let location = Location::of_world(&world, Some(elsewhere.clone())).unwrap();
    assert_eq!(location.state, StatePlace::Shared(elsewhere));
}

#[test]
fn missing_world_error_has_path_and_variable() {
    let error = Location::of_world(Path::new("/nowhere/world.yaml"), None).unwrap_err().to_string();
    assert!(error.contains("/nowhere/world.yaml") && error.contains(WORLD_VARIABLE), "{error}");
}

#[test]
fn state_is_in_shared_memory_if_world_is_read_only() {
    let root = TempDir::new().unwrap();
    let world = root.path().join("world.yaml");
    fs::write(&world, "").unwrap();
    // A file in place of the directory has the effect of a read-only mount, also for root.
    fs::write(root.path().join("state"), "").unwrap();
    let location = Location::of_world(&world, None).unwrap();
    let StatePlace::Shared(directory) = location.state else { panic!("{location:?}") };
    assert!(directory.starts_with("/dev/shm"), "{directory:?}");
    assert_eq!(
        Location::of_world(&world, None).unwrap().state,
        StatePlace::Shared(directory.clone())
    );
    fs::remove_dir(directory).unwrap();
}
