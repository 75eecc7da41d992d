//! The fake container runtime with real processes: the view of a program inside.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tessera_simcluster::node::container::{
    BindMount, Container, ContainerConfig, ContainerId, ContainerState, Image, ImageStore, RunAs,
    Runtime, RuntimeOptions,
};
use tessera_simcluster::node::namespaces;
use tessera_test_support::{report_skip, test_name};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tessera-simcluster");

/// Time limit far above any step, so that a hanging test fails with its place.
const TIMEOUT: Duration = Duration::from_secs(300);

struct TestRuntime {
    directory: tempfile::TempDir,
    runtime: Runtime,
}

impl TestRuntime {
    /// Returns `None` if the machine allows no namespaces. The skip is reported on standard error.
    fn set_up(test: &str) -> Option<Self> {
        if let Err(reason) = namespaces::check_support(Path::new(PROGRAM)) {
            report_skip(test, format!("namespaces are unavailable: {reason}"));
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
        let ContainerState::Exited { code, message, .. } = ended.state else { unreachable!() };
        (code, message.unwrap_or_default() + &std::fs::read_to_string(&ended.log).unwrap())
    }

    async fn ended(&self, id: &ContainerId) -> Container {
        let mut changes = self.runtime.subscribe();
        let exited = |container: &Container| {
            container.id == *id && matches!(container.state, ContainerState::Exited { .. })
        };
        loop {
            if let Some(container) = self.runtime.containers(&id.pod_uid).into_iter().find(exited) {
                return container;
            }
            tokio::time::timeout(TIMEOUT, changes.changed())
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
async fn container_has_own_root_pid_and_hostname() {
    let Some(runtime) = TestRuntime::set_up(test_name!()) else { return };
    let (code, output) = runtime
        .script(script("echo pid $$; cat /proc/sys/kernel/hostname; ls /; echo x >/tmp/x; exit 7"))
        .await;
    assert_eq!(code, 7, "{output}");
    assert!(output.starts_with("pid 1\npod-a\n"), "{output}");
    assert!(!output.contains("home"), "the machine's root shows: {output}");
}

#[tokio::test]
async fn cdi_edits_and_read_only_mounts_are_applied() {
    let Some(runtime) = TestRuntime::set_up(test_name!()) else { return };
    let grant = runtime.file("grant", "19456");
    let ledger = runtime.file("ledger", "....");
    let preload = runtime.file("ld.so.preload", "");
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
    runtime.file("cdi/claim.json", &spec.to_string());
    let mut config = script(
        "cat /dev/tessera/u-0/grant; echo; echo $NVIDIA_VISIBLE_DEVICES; echo used >/dev/tessera/u-0/ledger; \
         (echo 1 >/dev/tessera/u-0/grant) 2>/dev/null || echo refused; ls /etc; cat /proc/self/mountinfo",
    );
    config.cdi_devices = vec!["k8s.example.com/claim=u-0".into()];
    config.read_only_root = true;
    let (_, output) = runtime.script(config).await;
    assert!(output.starts_with("19456\nvoid\nrefused\n"), "{output}");
    assert!(output.contains("ld.so.preload"), "{output}");
    assert_eq!(std::fs::read_to_string(&ledger).unwrap(), "used\n");
    let mount = output.lines().find(|line| line.contains(" /dev/tessera/u-0/grant ")).unwrap();
    assert!(mount.split_whitespace().nth(5).unwrap().starts_with("ro"), "{mount}");
}

#[tokio::test]
async fn read_only_root_and_user_are_applied() {
    let Some(runtime) = TestRuntime::set_up(test_name!()) else { return };
    let mut config = script("id -u; id -g; (echo x >/etc/x) 2>/dev/null || echo read-only");
    config.read_only_root = true;
    config.user = RunAs { uid: 1000, gid: 2000, groups: vec![] };
    config.no_new_privileges = true;
    let (code, output) = runtime.script(config).await;
    assert_eq!((code, output.as_str()), (0, "1000\n2000\nread-only\n"));
}

#[tokio::test]
async fn user_namespace_maps_one_unprivileged_id() {
    let Some(runtime) = TestRuntime::set_up(test_name!()) else { return };
    let mut config = script("id -u; cat /proc/self/uid_map");
    config.user_namespace = true;
    let (code, output) = runtime.script(config).await;
    assert_eq!(code, 0, "{output}");
    let fields: Vec<u32> = output.split_whitespace().map(|field| field.parse().unwrap()).collect();
    let [seen, inner, outer, count] = fields[..] else { panic!("{output}") };
    assert_eq!((seen, inner, count), (0, 0, 1));
    if rustix::process::geteuid().is_root() {
        assert_ne!(outer, 0, "{output}");
    }
}

#[tokio::test]
async fn two_containers_share_a_mounted_file() {
    let Some(runtime) = TestRuntime::set_up(test_name!()) else { return };
    let shared = runtime.file("shared", "");
    let with_share = |name: &str, text: &str| {
        let mut config = script(text);
        config.id.name = name.into();
        config.mounts =
            vec![BindMount { source: shared.clone(), target: "/shared".into(), read_only: false }];
        config
    };
    runtime.script(with_share("one", "echo one >>/shared")).await;
    let (_, output) = runtime.script(with_share("two", "echo two >>/shared; cat /shared")).await;
    assert_eq!(output, "one\ntwo\n");
}

#[tokio::test]
async fn missing_program_exits_with_128_and_its_name() {
    let Some(runtime) = TestRuntime::set_up(test_name!()) else { return };
    let mut config = script("");
    config.command = vec!["no-such-program".into()];
    let (code, output) = runtime.script(config).await;
    assert_eq!(code, 128);
    assert!(output.contains("no-such-program"), "{output}");
}

#[tokio::test]
async fn terminate_is_handled_and_kill_is_not() {
    let Some(runtime) = TestRuntime::set_up(test_name!()) else { return };
    let listens = script("trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.01; done");
    let id = listens.id.clone();
    runtime.runtime.start(listens).await.unwrap();
    let log = runtime.runtime.containers("uid")[0].log.clone();
    let ready = async {
        while !std::fs::read_to_string(&log).unwrap().contains("ready") {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, ready).await.unwrap();
    runtime.runtime.terminate(&id);
    let ContainerState::Exited { code, .. } = runtime.ended(&id).await.state else {
        unreachable!()
    };
    assert_eq!((code, std::fs::read_to_string(&log).unwrap().as_str()), (0, "ready\nbye\n"));

    // The first process of a pid namespace ignores signals without a handler.
    let mut deaf = script("while :; do sleep 1; done");
    deaf.id.attempt = 1;
    let id = deaf.id.clone();
    runtime.runtime.start(deaf).await.unwrap();
    runtime.runtime.terminate(&id);
    runtime.runtime.kill(&id);
    let ContainerState::Exited { code, signal, .. } = runtime.ended(&id).await.state else {
        unreachable!()
    };
    assert_eq!((code, signal), (137, Some(9)));
}

#[tokio::test]
async fn shut_down_ends_processes_and_refuses_starts() {
    let Some(runtime) = TestRuntime::set_up(test_name!()) else { return };
    runtime.runtime.start(script("sleep 1000")).await.unwrap();
    let ContainerState::Running { pid, .. } = runtime.runtime.containers("uid")[0].state else {
        panic!("not running")
    };
    runtime.runtime.shut_down().await;
    assert!(!Path::new("/proc").join(pid.to_string()).exists());
    let mut another = script("true");
    another.id.attempt = 1;
    assert!(runtime.runtime.start(another).await.is_err());
    runtime.runtime.remove_ended("uid").unwrap();
    assert_eq!(std::fs::read_dir(runtime.path("containers")).unwrap().count(), 0);
}
