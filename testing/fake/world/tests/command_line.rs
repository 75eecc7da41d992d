//! Tests of the program's command line.

use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;
use tessera_fake_world::control::{ControlFile, EventKind, RecoveryAction};
use tessera_fake_world::shipped;

fn run(arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tessera-fake-world"))
        .args(arguments.iter().map(AsRef::as_ref))
        .output()
        .expect("the program runs")
}

fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).into_owned()
}

fn world(directory: &Path, content: &str) -> std::path::PathBuf {
    let path = directory.join("world.yaml");
    std::fs::write(&path, content).expect("the world is written");
    path
}

#[test]
fn check_prints_the_world() {
    let directory = TempDir::new().unwrap();
    for (name, content) in shipped::ALL {
        let output = run(&[&"check", &world(directory.path(), content)]);
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        assert!(text(&output.stdout).contains("GPU-"));
    }
    let matrix = text(&run(&[&"check", &world(directory.path(), shipped::DGX_1V)]).stdout);
    assert!(matrix.contains(" 0      X   NV1   NV1   NV2   NV2   SYS   SYS   SYS"), "{matrix}");
    let matrix = text(&run(&[&"check", &world(directory.path(), shipped::H100_8_NVSWITCH)]).stdout);
    assert!(matrix.contains(" 7   NV18  NV18  NV18  NV18  NV18  NV18  NV18     X"), "{matrix}");
}

#[test]
fn invalid_world_error_names_the_field() {
    let directory = TempDir::new().unwrap();
    let content = shipped::T4_1.replace("model: t4", "model: t5");
    let output = run(&[&"check", &world(directory.path(), &content)]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("gpus[0].model"), "{}", text(&output.stderr));
}

#[test]
fn control_edits_the_control_file() {
    let directory = TempDir::new().unwrap();
    let world = world(directory.path(), shipped::A100_4_PCIE);
    let uuid = tessera_fake_world::World::load(&world).unwrap().gpus[1].uuid.clone();
    for change in
        [&["lose", "1"][..], &["xid", "1", "79"], &["ecc", &uuid], &["process", "1", "77", "2048"]]
    {
        let mut arguments: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"control", &world];
        arguments.extend(change.iter().map(|word| word as &dyn AsRef<std::ffi::OsStr>));
        let output = run(&arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let control = ControlFile::new(directory.path().join("control.yaml")).read();
    assert!(control.is_lost(&uuid));
    assert_eq!(control.gpu(&uuid).unwrap().ecc_uncorrected, 1);
    assert_eq!(control.foreign_bytes(&uuid), 2 << 30);
    let kinds: Vec<_> = control.events.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::Xid(79), EventKind::EccDoubleBit]);
    assert!(
        run(&[&"control", &world, &"xid", &"0", &"119", &"--recovery", &"gpu-reset"])
            .status
            .success()
    );
    let first = tessera_fake_world::World::load(&world).unwrap().gpus[0].uuid.clone();
    let control = ControlFile::new(directory.path().join("control.yaml")).read();
    assert_eq!(control.gpu(&first).unwrap().recovery_action, RecoveryAction::GpuReset);
    assert_eq!(control.events.last().unwrap().kind, EventKind::Xid(154));
    assert!(run(&[&"control", &world, &"reset", &"0"]).status.success());
    let control = ControlFile::new(directory.path().join("control.yaml")).read();
    assert_eq!(control.gpu(&first).unwrap().recovery_action, RecoveryAction::None);
    let output = run(&[&"control", &world, &"xid", &"0", &"119", &"--recovery", &"unknown"]);
    assert!(!output.status.success() && text(&output.stderr).contains("drain-and-reset"));
    assert!(run(&[&"control", &world, &"heal", &"1"]).status.success());
    assert!(!ControlFile::new(directory.path().join("control.yaml")).read().is_lost(&uuid));
    let output = run(&[&"control", &world, &"lose", &"9"]);
    assert!(!output.status.success() && text(&output.stderr).contains("no GPU `9`"));
}
