use tempfile::TempDir;

use super::*;

const GPU: &str = "GPU-00000000-0000-4000-8000-000000000001";

#[test]
fn missing_file_is_empty() {
    let directory = TempDir::new().unwrap();
    let file = ControlFile::new(directory.path().join("control.yaml"));
    assert_eq!(*file.read(), Control::default());
}

#[test]
fn next_read_sees_change_and_removal() {
    let directory = TempDir::new().unwrap();
    let file = ControlFile::new(directory.path().join("control.yaml"));
    file.update(|control| control.gpu_mut(GPU).lost = true).unwrap();
    assert!(file.read().is_lost(GPU));
    fs::write(file.path(), format!("gpus: {{{GPU}: {{processes: [{{pid: 7, usedMiB: 2}}]}}}}\n"))
        .unwrap();
    let control = file.read();
    assert_eq!((control.is_lost(GPU), control.foreign_bytes(GPU)), (false, 2 * 1024 * 1024));
    fs::remove_file(file.path()).unwrap();
    assert_eq!(*file.read(), Control::default());
}

#[test]
fn control_round_trips() {
    let directory = TempDir::new().unwrap();
    let file = ControlFile::new(directory.path().join("control.yaml"));
    let fill = |control: &mut Control| {
        control.driver_not_loaded = true;
        control.push_event(GPU, EventKind::Xid(79));
        control.push_event(GPU, EventKind::EccDoubleBit);
        let process = ForeignProcess { pid: 1, used_mib: 2, name: "x: y".to_owned() };
        *control.gpu_mut(GPU) = GpuCondition {
            lost: true,
            hung: true,
            recovery_action: RecoveryAction::DrainP2p,
            mig: Some(false),
            processes: vec![process],
            ecc_corrected: 1,
            ecc_uncorrected: 2,
            utilization: Some(3),
            temperature: Some(4),
        };
    };
    file.update(fill).unwrap();
    let mut expected = Control::default();
    fill(&mut expected);
    assert_eq!(*file.read(), expected);
    assert_eq!(expected.events.iter().map(|event| event.id).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn malformed_file_is_ignored_and_not_overwritten() {
    let directory = TempDir::new().unwrap();
    let file = ControlFile::new(directory.path().join("control.yaml"));
    file.update(|control| control.gpu_mut(GPU).lost = true).unwrap();
    file.read();
    fs::write(file.path(), "gpus: {x: {unknown: true}}").unwrap();
    assert!(file.read().is_lost(GPU));
    let error = file.update(|_| ()).unwrap_err().to_string();
    assert!(error.contains("unknown"), "{error}");
}
