//! Killing components at random moments, one after the other, and starting each again.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::operations::Operations;
use crate::random::Random;

/// Who is killed.
type Victim = (String, &'static str);

/// Kills components until it is told to end.
pub(super) struct Harm<'a> {
    hands: &'a Operations,
    victims: Vec<Victim>,
    random: Random,
    /// Longest pause between two kills.
    pause: Duration,
    /// Who is down now.
    down: Option<Victim>,
    pub(super) kills: usize,
}

impl<'a> Harm<'a> {
    pub(super) fn new(
        hands: &'a Operations,
        nodes: &[String],
        random: Random,
        pause: Duration,
    ) -> Self {
        let on_nodes = nodes
            .iter()
            .flat_map(|node| ["driver", "kubelet"].map(|component| (node.clone(), component)));
        let victims = on_nodes.chain([("control-plane".to_owned(), "controller")]).collect();
        Self { hands, victims, random, pause, down: None, kills: 0 }
    }

    /// Kills one component after the other, and starts each again. Once `end` is cancelled it
    /// finishes with the one that is down and kills no other. Not to be dropped before: an
    /// action that is cut off may be carried out or not, and a start after a kill that has not
    /// happened finds the component alive.
    ///
    /// # Errors
    /// An action failed. [`repair`](Self::repair) tries to start what is down.
    pub(super) async fn go_on(&mut self, end: &CancellationToken) -> anyhow::Result<()> {
        while !self.is_told_within(self.pause, end).await {
            let victim = self.random.one_of(&self.victims).clone();
            self.down = Some(victim.clone());
            self.hands.run(&["kill", &victim.0, victim.1]).await?;
            self.kills += 1;
            self.is_told_within(Duration::from_secs(2), end).await;
            self.repair().await?;
        }
        Ok(())
    }

    /// Starts again what is down.
    pub(super) async fn repair(&mut self) -> anyhow::Result<()> {
        if let Some((node, component)) = self.down.clone() {
            self.hands.run(&["start", &node, component]).await?;
            self.down = None;
        }
        Ok(())
    }

    /// Pauses; returns early, and says so, when `end` is cancelled. The pauses are the input of the
    /// trial; nothing is waited for with them.
    async fn is_told_within(&mut self, longest: Duration, end: &CancellationToken) -> bool {
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

    /// Logs what begins and ends. A kill says that it has begun, and goes on when it is told to.
    const SCRIPT: &str = r#"#!/bin/sh
cd "${0%/*}"
echo "$1 begins" >>log
if [ "$1" = kill ]; then
  echo begun >begun
  read -r _ <go-on
fi
echo "$1 ends" >>log
"#;

    /// The script in place of `node.sh`.
    fn operations(directory: &Path) -> Operations {
        let program = directory.join("node.sh");
        // Not by this process: another thread's child may hold the file open for writing when it is
        // to be executed.
        let mut write = Command::new("sh");
        write.args(["-c", "printf %s \"$1\" >\"$2\"", "sh", SCRIPT]).arg(&program);
        assert!(write.status().unwrap().success());
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Operations::by(program)
    }

    fn pipe(directory: &Path, name: &str) -> (pipe::Sender, pipe::Receiver) {
        let path = directory.join(name);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let mut options = pipe::OpenOptions::new();
        let options = options.read_write(true);
        (options.open_sender(&path).unwrap(), options.open_receiver(&path).unwrap())
    }

    #[tokio::test]
    async fn a_kill_that_has_begun_is_finished_before_the_start() {
        let directory = tempfile::tempdir().unwrap();
        let hands = operations(directory.path());
        let (_, mut begun) = pipe(directory.path(), "begun");
        let (mut go_on, _) = pipe(directory.path(), "go-on");
        let mut harm = Harm::new(&hands, &["node".to_owned()], Random::new(1), Duration::ZERO);
        let end = CancellationToken::new();
        let told = async {
            begun.read_u8().await?;
            end.cancel();
            Ok(go_on.write_all(b"go on\n").await?)
        };
        tokio::try_join!(harm.go_on(&end), told).unwrap();
        harm.repair().await.unwrap();
        let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
        assert_eq!(log, "kill begins\nkill ends\nstart begins\nstart ends\n");
        assert_eq!(harm.kills, 1);
    }
}
