use serde_json::json;

use super::*;

fn directory(files: &[(&str, serde_json::Value)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(directory.path().join(name), content.to_string()).unwrap();
    }
    directory
}

fn mount(target: &str, source: &str, options: &[&str]) -> serde_json::Value {
    json!({"hostPath": source, "containerPath": target, "options": options})
}

fn base() -> (&'static str, serde_json::Value) {
    let spec = json!({
        "cdiVersion": "0.5.0", "kind": "example.com/driver",
        "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": [
            mount("/usr/lib/libcuda.so.1", "/driver/libcuda.so.1", &["ro", "bind"]),
        ]},
        "devices": [
            {"name": "GPU-1", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/driver/dev/nvidia0"}]}},
            {"name": "GPU-2", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}]}},
        ],
    });
    ("driver.json", spec)
}

fn claim(name: &str, mounts: Vec<serde_json::Value>) -> serde_json::Value {
    json!({
        "cdiVersion": "0.5.0", "kind": "example.com/claim",
        "devices": [{"name": name, "containerEdits": {"env": [format!("SEEN={name}")], "mounts": mounts}}],
    })
}

fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

#[test]
fn spec_edits_apply_once_before_device_edits() {
    let directory = directory(&[base()]);
    let edits = resolve(
        &[directory.path().to_owned()],
        &ids(&["example.com/driver=GPU-1", "example.com/driver=GPU-2"]),
    )
    .unwrap();
    assert_eq!(edits.env["NVIDIA_VISIBLE_DEVICES"], "void");
    assert_eq!(edits.mounts.len(), 1);
    assert!(edits.mounts[0].read_only);
    let devices: Vec<_> = edits.devices.iter().map(|node| (&*node.source, &*node.target)).collect();
    assert_eq!(
        devices,
        [
            (Path::new("/driver/dev/nvidia0"), Path::new("/dev/nvidia0")),
            (Path::new("/dev/nvidia1"), Path::new("/dev/nvidia1"))
        ]
    );
}

#[test]
fn later_mount_wins_and_deep_paths_are_last() {
    let over = claim(
        "a",
        vec![
            mount("/deep/er/path", "/x", &["bind"]),
            mount("/usr/lib/libcuda.so.1", "/proxy/libcuda.so.1", &["ro", "rbind"]),
            mount("/deep", "/y", &["bind"]),
        ],
    );
    let directory = directory(&[base(), ("claim.json", over)]);
    let edits = resolve(
        &[directory.path().to_owned()],
        &ids(&["example.com/driver=GPU-1", "example.com/claim=a"]),
    )
    .unwrap();
    let targets: Vec<_> = edits.mounts.iter().map(|mount| mount.target.to_str().unwrap()).collect();
    assert_eq!(targets, ["/deep", "/deep/er/path", "/usr/lib/libcuda.so.1"]);
    assert_eq!(edits.mounts[2].source, Path::new("/proxy/libcuda.so.1"));
}

#[test]
fn error_names_all_unresolvable_devices() {
    let directory = directory(&[base(), ("broken.json", json!("no spec"))]);
    let error = resolve(
        &[directory.path().to_owned()],
        &ids(&["example.com/driver=GPU-1", "example.com/claim=b", "example.com/claim=c"]),
    )
    .unwrap_err();
    assert!(error.to_string().ends_with("example.com/claim=b, example.com/claim=c"), "{error}");
}

#[test]
fn duplicate_device_conflicts_only_when_requested() {
    let directory = directory(&[
        base(),
        ("one.json", claim("a", vec![mount("/a", "/a", &["bind"])])),
        ("two.json", claim("a", vec![mount("/b", "/b", &["bind"])])),
    ]);
    let directories = [directory.path().to_owned()];
    assert!(matches!(
        resolve(&directories, &ids(&["example.com/claim=a"])),
        Err(CdiError::Conflict { .. })
    ));
    assert!(resolve(&directories, &ids(&["example.com/driver=GPU-1"])).is_ok());
}

#[test]
fn mount_without_bind_is_refused_like_runc() {
    let directory = directory(&[("claim.json", claim("a", vec![mount("/a", "/a", &["ro"])]))]);
    let error =
        resolve(&[directory.path().to_owned()], &ids(&["example.com/claim=a"])).unwrap_err();
    assert!(error.to_string().contains("without the option `bind`"), "{error}");
}

#[test]
fn hook_is_refused() {
    let spec = json!({
        "cdiVersion": "0.5.0", "kind": "example.com/claim",
        "devices": [{"name": "a", "containerEdits": {"hooks": [{"hookName": "createContainer", "path": "/bin/ldconfig"}]}}],
    });
    let directory = directory(&[("claim.json", spec)]);
    let error =
        resolve(&[directory.path().to_owned()], &ids(&["example.com/claim=a"])).unwrap_err();
    assert!(error.to_string().contains("createContainer"), "{error}");
}

#[test]
fn missing_directory_has_no_devices() {
    let error = resolve(&["/nowhere/cdi".into()], &ids(&["example.com/claim=a"])).unwrap_err();
    assert!(matches!(error, CdiError::Unresolvable { .. }));
    assert_eq!(resolve(&["/nowhere/cdi".into()], &[]).unwrap(), Edits::default());
}
