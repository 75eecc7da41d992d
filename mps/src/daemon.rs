//! A running daemon process.

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

/// Number of output bytes that are kept.
const MAX_OUTPUT: usize = 1024;

/// Time limit to read the remaining output after the exit; MPS servers may keep the pipe open.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

/// A running daemon. Dropping this does not stop it.
#[derive(Debug)]
pub(crate) struct DaemonProcess {
    pub(crate) pid: u32,
    kill: CancellationToken,
}

/// Exit of a daemon.
#[derive(Debug)]
pub(crate) struct DaemonExit {
    status: io::Result<ExitStatus>,
    output: String,
}

impl DaemonProcess {
    /// Starts the daemon and calls `on_exit` when it exits.
    ///
    /// Must be called on a thread that lives as long as the supervisor: the daemon is killed when
    /// the thread that started it exits (`PR_SET_PDEATHSIG` in prctl(2)).
    pub(crate) fn start(
        mut command: Command,
        on_exit: impl FnOnce(DaemonExit) + Send + 'static,
    ) -> io::Result<Self> {
        let (output, input) = io::pipe()?;
        let output = pipe::Receiver::from_owned_fd(output.into())?;
        command.stdout(Stdio::from(input.try_clone()?)).stderr(Stdio::from(input));
        let child = command.spawn()?;
        let pid = child.id().ok_or_else(|| io::Error::other("invariant: a new child has a PID"))?;
        let kill = CancellationToken::new();
        let watch = watch(child, output, kill.clone());
        tokio::spawn(async move { on_exit(watch.await) });
        Ok(Self { pid, kill })
    }

    /// Kills the daemon's process group.
    pub(crate) fn kill(&self) {
        self.kill.cancel();
    }
}

impl DaemonExit {
    /// Returns the reason of the exit, with the daemon's last output and the end of its log.
    /// `killed` is the reason why the supervisor killed it.
    pub(crate) fn reason(&self, killed: Option<String>, log: &str) -> String {
        let by_itself = match &self.status {
            Ok(status) if status.code() == Some(NOT_ENTERED.into()) && !self.output.is_empty() => {
                // The log belongs to earlier daemons.
                return self.output.clone();
            }
            Ok(status) => format!("the daemon exited ({status})"),
            Err(error) => format!("cannot wait for the daemon: {error}"),
        };
        let mut reason = killed.unwrap_or(by_itself);
        // In the foreground, NVIDIA's daemon also prints its log lines.
        if !self.output.lines().next_back().is_none_or(|last| log.contains(last)) {
            reason += &format!("\noutput:\n{}", self.output);
        }
        if !log.is_empty() {
            reason += &format!("\ncontrol.log:\n{log}");
        }
        reason
    }
}

async fn watch(
    mut child: Child,
    mut output: pipe::Receiver,
    kill: CancellationToken,
) -> DaemonExit {
    let group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let (mut text, mut killed, mut is_closed) = (Vec::new(), false, false);
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            () = kill.cancelled(), if !killed => {
                killed = true;
                // The PID is not reused before `wait` has returned.
                let _ = group.map(|group| kill_process_group(group, Signal::KILL));
            }
            // The daemon may close its output and continue to run.
            open = read_output(&mut output, &mut text), if !is_closed => is_closed = !open,
        }
    };
    let rest = async { while read_output(&mut output, &mut text).await {} };
    let _ = timeout(DRAIN_TIMEOUT, rest).await;
    DaemonExit { status, output: String::from_utf8_lossy(&text).trim().to_owned() }
}

/// Appends the next output to `text`; returns false at its end.
async fn read_output(output: &mut pipe::Receiver, text: &mut Vec<u8>) -> bool {
    let mut buffer = [0; 512];
    let count = output.read(&mut buffer).await.unwrap_or(0);
    tracing::debug!(output = %String::from_utf8_lossy(&buffer[..count]), "MPS daemon output");
    text.extend_from_slice(&buffer[..count]);
    text.drain(..text.len().saturating_sub(MAX_OUTPUT));
    count > 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn end(code: i32, output: &str) -> DaemonExit {
        DaemonExit { status: Ok(ExitStatus::from_raw(code << 8)), output: output.to_owned() }
    }

    #[test]
    fn reason_has_output_and_log_without_repetition() {
        let reason = |output, log| end(1, output).reason(None, log);
        assert_eq!(reason("", ""), "the daemon exited (exit status: 1)");
        let both = "the daemon exited (exit status: 1)\noutput:\nno libcuda\ncontrol.log:\nstarted";
        assert_eq!(reason("no libcuda", "started"), both);
        let once = "the daemon exited (exit status: 1)\ncontrol.log:\n[1] no GPU";
        assert_eq!(reason("no GPU", "[1] no GPU"), once);
    }

    #[tokio::test]
    async fn daemon_that_closed_its_output_can_be_killed() {
        let mut script = Command::new("sh");
        script.args(["-c", "echo beginning; exec >&- 2>&-; exec sleep 1000"]).process_group(0);
        let (sender, mut ends) = tokio::sync::mpsc::unbounded_channel();
        let daemon =
            DaemonProcess::start(script, move |end| drop(sender.send(end))).expect("started");
        let outputs = [1, 2].map(|number| format!("/proc/{}/fd/{number}", daemon.pid));
        while outputs.iter().any(|output| std::path::Path::new(output).exists()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Long enough to see that the output is closed.
        let early = timeout(Duration::from_millis(50), ends.recv()).await;
        assert!(early.is_err(), "still running: {early:?}");
        daemon.kill();
        let end =
            timeout(Duration::from_secs(300), ends.recv()).await.expect("exits").expect("reported");
        assert_eq!(end.status.expect("waited for").signal(), Some(9));
        assert_eq!(end.output, "beginning");
    }

    #[test]
    fn reason_names_kill_or_failed_execution() {
        let killed = || Some("unresponsive".to_owned());
        assert_eq!(end(0, "").reason(killed(), ""), "unresponsive");
        assert_eq!(
            end(NOT_ENTERED.into(), "no such program").reason(None, "old log"),
            "no such program"
        );
    }
}
