//! The container stand-in, run for real: what a program sees inside.

#![expect(clippy::unwrap_used, reason = "a test says by panicking where it stands")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tessera_simcluster::node::container::{
    BindMount, Container, ContainerConfig, ContainerId, Image, ImageStore, RunAs, Runtime,
    RuntimeOptions, State,
};
use tessera_simcluster::node::namespaces;
use tessera_test_support::{report_skip, test_name};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tessera-simcluster");

/// Far beyond what any step takes, so that a test that hangs says where.
const PATIENCE: Duration = Duration::from_secs(300);

struct Bench {
    directory: tempfile::TempDir,
    runtime: Runtime,
}

impl Bench {
    /// None where the machine allows no namespaces; said on standard error, for the list of skipped
    /// tests.
    fn set_up(test: &str) -> Option<Self> {
        if let Err(reason) = namespaces::allowed(Path::new(PROGRAM)) {
            report_skip(test, format!("no namespaces here: {reason}"));
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let mut images = ImageStore::default();
        let programs =
            ["/bin/sh", "/bin/cat", "/usr/bin/id", "/usr/bin/stat", "/bin/sleep", "/bin/ls"];
        images.insert("tools", Image::of_programs(&programs).unwrap());
        std::fs::create_dir(directory.path().join("cdi")).unwrap();
        let runtime = Runtime::new(RuntimeOptions {
            directory: directory.path().join("containers"),
            cdi_directories: vec![directory.path().join("cdi")],
            images,
            init_program: PROGRAM.into(),
        });
        Some(Self { directory, runtime })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Runs a script to its end and returns exit code and output.
    async fn script(&self, config: ContainerConfig) -> (i32, String) {
        let id = config.id.clone();
        self.runtime.start(config).await.unwrap();
        let ended = self.ended(&id).await;
        let State::Exited { code, message, .. } = ended.state else { unreachable!() };
        (code, message.unwrap_or_default() + &std::fs::read_to_string(&ended.log).unwrap())
    }

    async fn ended(&self, id: &ContainerId) -> Container {
        let mut changes = self.runtime.subscribe();
        let exited = |container: &Container| {
            container.id == *id && matches!(container.state, State::Exited { .. })
        };
        loop {
            if let Some(container) = self.runtime.containers(&id.pod_uid).into_iter().find(exited) {
                return container;
            }
            tokio::time::timeout(PATIENCE, changes.changed())
                .await
                .expect("the container ends")
                .unwrap();
        }
    }
}

fn script(text: &str) -> ContainerConfig {
    ContainerConfig {
        id: ContainerId { pod_uid: "uid".into(), name: "c".into(), attempt: 0 },
        image: "tools".into(),
        hostname: "pod-a".into(),
        command: vec!["sh".into(), "-c".into(), text.into()],
        args: vec![],
        env: BTreeMap::new(),
        mounts: vec![],
        cdi_devices: vec![],
        working_dir: "/".into(),
        read_only_root: false,
        user: RunAs::default(),
        no_new_privileges: false,
        user_namespace: false,
    }
}

#[tokio::test]
async fn a_container_has_a_root_a_pid_and_a_name_of_its_own() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let (code, output) = bench
        .script(script("echo pid $$; cat /proc/sys/kernel/hostname; ls /; echo x >/tmp/x; exit 7"))
        .await;
    assert_eq!(code, 7, "{output}");
    assert!(output.starts_with("pid 1\npod-a\n"), "{output}");
    assert!(!output.contains("home"), "the machine's root shows: {output}");
}

#[tokio::test]
async fn cdi_edits_show_inside_and_their_read_only_mounts_are_roots_of_mounts() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let grant = bench.file("grant", "19456");
    let ledger = bench.file("ledger", "....");
    let preload = bench.file("ld.so.preload", "");
    let spec = json!({
        "cdiVersion": "0.5.0", "kind": "k8s.example.com/claim",
        "devices": [{"name": "u-0", "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "mounts": [
                {"hostPath": grant, "containerPath": "/dev/tessera/u-0/grant", "options": ["ro", "bind"]},
                {"hostPath": ledger, "containerPath": "/dev/tessera/u-0/ledger", "options": ["rw", "bind"]},
                {"hostPath": preload, "containerPath": "/etc/ld.so.preload", "options": ["ro", "bind"]},
            ],
        }}],
    });
    bench.file("cdi/claim.json", &spec.to_string());
    let mut config = script(
        "cat /dev/tessera/u-0/grant; echo; echo $NVIDIA_VISIBLE_DEVICES; echo used >/dev/tessera/u-0/ledger; \
         (echo 1 >/dev/tessera/u-0/grant) 2>/dev/null || echo refused; ls /etc; cat /proc/self/mountinfo",
    );
    config.cdi_devices = vec!["k8s.example.com/claim=u-0".into()];
    config.read_only_root = true;
    let (_, output) = bench.script(config).await;
    assert!(output.starts_with("19456\nvoid\nrefused\n"), "{output}");
    assert!(output.contains("ld.so.preload"), "{output}");
    assert_eq!(std::fs::read_to_string(&ledger).unwrap(), "used\n");
    let mount = output.lines().find(|line| line.contains(" /dev/tessera/u-0/grant ")).unwrap();
    assert!(mount.split_whitespace().nth(5).unwrap().starts_with("ro"), "{mount}");
}

#[tokio::test]
async fn a_read_only_root_refuses_writes_and_another_user_is_that_user() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let mut config = script("id -u; id -g; (echo x >/etc/x) 2>/dev/null || echo read-only");
    config.read_only_root = true;
    config.user = RunAs { uid: 1000, gid: 2000, groups: vec![] };
    config.no_new_privileges = true;
    let (code, output) = bench.script(config).await;
    assert_eq!((code, output.as_str()), (0, "1000\n2000\nread-only\n"));
}

#[tokio::test]
async fn a_user_namespace_maps_one_id_that_is_not_root_outside() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let mut config = script("id -u; cat /proc/self/uid_map");
    config.user_namespace = true;
    let (code, output) = bench.script(config).await;
    assert_eq!(code, 0, "{output}");
    let fields: Vec<u32> = output.split_whitespace().map(|field| field.parse().unwrap()).collect();
    let [seen, inner, outer, count] = fields[..] else { panic!("{output}") };
    assert_eq!((seen, inner, count), (0, 0, 1));
    if rustix::process::geteuid().is_root() {
        assert_ne!(outer, 0, "{output}");
    }
}

#[tokio::test]
async fn two_containers_share_a_file_that_is_mounted_into_both() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let shared = bench.file("shared", "");
    let with_share = |name: &str, text: &str| {
        let mut config = script(text);
        config.id.name = name.into();
        config.mounts =
            vec![BindMount { source: shared.clone(), target: "/shared".into(), read_only: false }];
        config
    };
    bench.script(with_share("one", "echo one >>/shared")).await;
    let (_, output) = bench.script(with_share("two", "echo two >>/shared; cat /shared")).await;
    assert_eq!(output, "one\ntwo\n");
}

#[tokio::test]
async fn a_missing_program_ends_with_128_and_says_which() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let mut config = script("");
    config.command = vec!["no-such-program".into()];
    let (code, output) = bench.script(config).await;
    assert_eq!(code, 128);
    assert!(output.contains("no-such-program"), "{output}");
}

#[tokio::test]
async fn terminate_reaches_a_program_that_listens_and_kill_the_one_that_does_not() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let listens = script("trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.01; done");
    let id = listens.id.clone();
    bench.runtime.start(listens).await.unwrap();
    let log = bench.runtime.containers("uid")[0].log.clone();
    let ready = async {
        while !std::fs::read_to_string(&log).unwrap().contains("ready") {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, ready).await.unwrap();
    bench.runtime.terminate(&id);
    let State::Exited { code, .. } = bench.ended(&id).await.state else { unreachable!() };
    assert_eq!((code, std::fs::read_to_string(&log).unwrap().as_str()), (0, "ready\nbye\n"));

    // The first process of a pid namespace ignores signals that it does not handle.
    let mut deaf = script("while :; do sleep 1; done");
    deaf.id.attempt = 1;
    let id = deaf.id.clone();
    bench.runtime.start(deaf).await.unwrap();
    bench.runtime.terminate(&id);
    bench.runtime.kill(&id);
    let State::Exited { code, signal, .. } = bench.ended(&id).await.state else { unreachable!() };
    assert_eq!((code, signal), (137, Some(9)));
}

#[tokio::test]
async fn shutting_down_leaves_no_process_and_starts_nothing_more() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    bench.runtime.start(script("sleep 1000")).await.unwrap();
    let State::Running { pid, .. } = bench.runtime.containers("uid")[0].state else {
        panic!("not running")
    };
    bench.runtime.shut_down().await;
    assert!(!Path::new("/proc").join(pid.to_string()).exists());
    let mut another = script("true");
    another.id.attempt = 1;
    assert!(bench.runtime.start(another).await.is_err());
    bench.runtime.remove_ended("uid").unwrap();
    assert_eq!(std::fs::read_dir(bench.path("containers")).unwrap().count(), 0);
}
