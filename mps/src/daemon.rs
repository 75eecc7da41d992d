//! A daemon that runs.

use std::{
    io,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::AsyncReadExt,
    net::unix::pipe,
    process::{Child, Command},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::enter::NOT_ENTERED;

/// Of what a daemon says beside its log, so much is kept.
const KEPT: usize = 1024;

/// Its servers may keep the pipe open.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// A daemon that runs. It is not stopped by dropping this.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) pid: u32,
    kill: CancellationToken,
}

/// How a daemon ended.
#[derive(Debug)]
pub(crate) struct End {
    status: io::Result<ExitStatus>,
    said: String,
}

impl Daemon {
    /// Starts it, and has `ended` told of its end.
    ///
    /// To be called on a thread that lives as long as the keeper: the daemon gets its signal when
    /// the thread ends that started it (`PR_SET_PDEATHSIG` in prctl(2)).
    pub(crate) fn start(
        mut command: Command,
        ended: impl FnOnce(End) + Send + 'static,
    ) -> io::Result<Self> {
        let (output, input) = io::pipe()?;
        let output = pipe::Receiver::from_owned_fd(output.into())?;
        command.stdout(Stdio::from(input.try_clone()?)).stderr(Stdio::from(input));
        let child = command.spawn()?;
        let pid = child.id().ok_or_else(|| io::Error::other("invariant: a new child has a PID"))?;
        let kill = CancellationToken::new();
        let watch = watch(child, output, kill.clone());
        tokio::spawn(async move { ended(watch.await) });
        Ok(Self { pid, kill })
    }

    /// Kills its process group.
    pub(crate) fn kill(&self) {
        self.kill.cancel();
    }
}

impl End {
    /// Why it ended, in words: `killed` says why if the keeper has killed it. With its last words
    /// and the end of its log.
    pub(crate) fn reason(&self, killed: Option<String>, log: &str) -> String {
        let by_itself = match &self.status {
            Ok(status) if status.code() == Some(NOT_ENTERED.into()) && !self.said.is_empty() => {
                // Its log is of earlier ones.
                return self.said.clone();
            }
            Ok(status) => format!("the daemon ended by itself ({status})"),
            Err(error) => format!("the daemon cannot be watched: {error}"),
        };
        let mut reason = killed.unwrap_or(by_itself);
        // In the foreground, NVIDIA's daemon says what it logs.
        if !self.said.lines().next_back().is_none_or(|last| log.contains(last)) {
            reason += &format!("\nit said:\n{}", self.said);
        }
        if !log.is_empty() {
            reason += &format!("\ncontrol.log:\n{log}");
        }
        reason
    }
}

async fn watch(mut child: Child, mut output: pipe::Receiver, kill: CancellationToken) -> End {
    let group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let (mut said, mut killed, mut silent) = (Vec::new(), false, false);
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            () = kill.cancelled(), if !killed => {
                killed = true;
                // Its number is nobody else's as long as nobody has waited for it.
                let _ = group.map(|group| kill_process_group(group, Signal::KILL));
            }
            // It may close its output and go on.
            open = listen(&mut output, &mut said), if !silent => silent = !open,
        }
    };
    let rest = async { while listen(&mut output, &mut said).await {} };
    let _ = timeout(LAST_WORDS, rest).await;
    End { status, said: String::from_utf8_lossy(&said).trim().to_owned() }
}

/// Takes what it says; false where there is no more.
async fn listen(output: &mut pipe::Receiver, said: &mut Vec<u8>) -> bool {
    let mut heard = [0; 512];
    let count = output.read(&mut heard).await.unwrap_or(0);
    tracing::debug!(said = %String::from_utf8_lossy(&heard[..count]), "an MPS daemon speaks");
    said.extend_from_slice(&heard[..count]);
    said.drain(..said.len().saturating_sub(KEPT));
    count > 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn end(code: i32, said: &str) -> End {
        End { status: Ok(ExitStatus::from_raw(code << 8)), said: said.to_owned() }
    }

    #[test]
    fn a_reason_shows_last_words_and_log_but_nothing_twice() {
        let reason = |said, log| end(1, said).reason(None, log);
        assert_eq!(reason("", ""), "the daemon ended by itself (exit status: 1)");
        let both = "the daemon ended by itself (exit status: 1)\nit said:\nno libcuda\ncontrol.log:\nstarted";
        assert_eq!(reason("no libcuda", "started"), both);
        let once = "the daemon ended by itself (exit status: 1)\ncontrol.log:\n[1] no GPU";
        assert_eq!(reason("no GPU", "[1] no GPU"), once);
    }

    #[tokio::test]
    async fn one_that_says_nothing_any_more_can_be_killed() {
        let mut script = Command::new("sh");
        script.args(["-c", "echo beginning; exec >&- 2>&-; exec sleep 1000"]).process_group(0);
        let (sender, mut ends) = tokio::sync::mpsc::unbounded_channel();
        let daemon = Daemon::start(script, move |end| drop(sender.send(end))).expect("started");
        let outputs = [1, 2].map(|number| format!("/proc/{}/fd/{number}", daemon.pid));
        while outputs.iter().any(|output| std::path::Path::new(output).exists()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Long enough to be told that there is nothing more to hear.
        let early = timeout(Duration::from_millis(50), ends.recv()).await;
        assert!(early.is_err(), "it goes on: {early:?}");
        daemon.kill();
        let end =
            timeout(Duration::from_secs(300), ends.recv()).await.expect("it ends").expect("told");
        assert_eq!(end.status.expect("waited for").signal(), Some(9));
        assert_eq!(end.said, "beginning");
    }

    #[test]
    fn one_that_was_killed_or_never_began_ends_for_that_reason() {
        let killed = || Some("it was silent".to_owned());
        assert_eq!(end(0, "").reason(killed(), ""), "it was silent");
        assert_eq!(
            end(NOT_ENTERED.into(), "no such program").reason(None, "of before"),
            "no such program"
        );
    }
}
