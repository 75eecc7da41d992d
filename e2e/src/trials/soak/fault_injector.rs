//! Fault injection: kills components at random times, one after the other, and restarts each.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::operations::Operations;
use crate::random::Random;

/// A component by node and name.
type Component = (String, &'static str);

/// Kills and restarts components until it is cancelled.
pub(super) struct FaultInjector<'a> {
    operations: &'a Operations,
    components: Vec<Component>,
    random: Random,
    /// Maximum pause between two kills.
    pause: Duration,
    /// The component that is stopped now.
    stopped: Option<Component>,
    pub(super) kills: usize,
}

impl<'a> FaultInjector<'a> {
    pub(super) fn new(
        operations: &'a Operations,
        nodes: &[String],
        random: Random,
        pause: Duration,
    ) -> Self {
        let on_nodes =
            nodes.iter().flat_map(|node| ["driver", "kubelet"].map(|name| (node.clone(), name)));
        let components = on_nodes.chain([("control-plane".to_owned(), "controller")]).collect();
        Self { operations, components, random, pause, stopped: None, kills: 0 }
    }

    /// Kills one component after the other and restarts each. After the cancellation of `end` it
    /// restarts the stopped one and returns.
    ///
    /// The future must not be dropped before: an interrupted operation may be carried out or not,
    /// and a start after a kill that was not carried out fails.
    ///
    /// # Errors
    /// Returns an error if an operation fails. [`restart_stopped`](Self::restart_stopped) starts
    /// the stopped component.
    pub(super) async fn run(&mut self, end: &CancellationToken) -> anyhow::Result<()> {
        while !self.pause_or_cancelled(self.pause, end).await {
            let component = self.random.one_of(&self.components).clone();
            self.stopped = Some(component.clone());
            self.operations.run(&["kill", &component.0, component.1]).await?;
            self.kills += 1;
            self.pause_or_cancelled(Duration::from_secs(2), end).await;
            self.restart_stopped().await?;
        }
        Ok(())
    }

    /// Restarts the stopped component, if any.
    pub(super) async fn restart_stopped(&mut self) -> anyhow::Result<()> {
        if let Some((node, component)) = self.stopped.clone() {
            self.operations.run(&["start", &node, component]).await?;
            self.stopped = None;
        }
        Ok(())
    }

    /// Pauses for a random time. Returns true if `end` was cancelled. The pauses are input of the
    /// trial, not a wait for a condition.
    async fn pause_or_cancelled(&mut self, longest: Duration, end: &CancellationToken) -> bool {
        let longest = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
        let pause = Duration::from_millis(self.random.between(0, longest));
        tokio::time::timeout(pause, end.cancelled()).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::process::Command;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::unix::pipe;

    use super::*;

    /// Logs the start and end of each action. A kill writes to a pipe and continues after a
    /// message.
    const SCRIPT: &str = r#"#!/bin/sh
cd "${0%/*}"
echo "$1 begins" >>log
if [ "$1" = kill ]; then
  echo begun >begun
  read -r _ <go-on
fi
echo "$1 ends" >>log
"#;

    /// Installs the script in place of `node.sh`.
    fn operations(directory: &Path) -> Operations {
        let program = directory.join("node.sh");
        // Not written by this process: a child of another thread may hold the file open for
        // writing, and then it cannot be executed.
        let mut write = Command::new("sh");
        write.args(["-c", "printf %s \"$1\" >\"$2\"", "sh", SCRIPT]).arg(&program);
        assert!(write.status().unwrap().success());
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Operations::new(program)
    }

    fn pipe(directory: &Path, name: &str) -> (pipe::Sender, pipe::Receiver) {
        let path = directory.join(name);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let mut options = pipe::OpenOptions::new();
        let options = options.read_write(true);
        (options.open_sender(&path).unwrap(), options.open_receiver(&path).unwrap())
    }

    #[tokio::test]
    async fn started_kill_ends_before_restart() {
        let directory = tempfile::tempdir().unwrap();
        let operations = operations(directory.path());
        let (_, mut begun) = pipe(directory.path(), "begun");
        let (mut go_on, _) = pipe(directory.path(), "go-on");
        let mut injector =
            FaultInjector::new(&operations, &["node".to_owned()], Random::new(1), Duration::ZERO);
        let end = CancellationToken::new();
        let cancel = async {
            begun.read_u8().await?;
            end.cancel();
            Ok(go_on.write_all(b"continue\n").await?)
        };
        tokio::try_join!(injector.run(&end), cancel).unwrap();
        injector.restart_stopped().await.unwrap();
        let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
        assert_eq!(log, "kill begins\nkill ends\nstart begins\nstart ends\n");
        assert_eq!(injector.kills, 1);
    }
}
