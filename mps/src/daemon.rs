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
    /// To be called on a thread that lives as long as the keeper: the daemon gets its signal when the thread ends that started it
    /// (`PR_SET_PDEATHSIG` in prctl(2)).
    pub(crate) fn start(mut command: Command, ended: impl FnOnce(End) + Send + 'static) -> io::Result<Self> {
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
    /// In words.
    pub(crate) fn reason(&self) -> String {
        match &self.status {
            Ok(status) if status.code() == Some(NOT_ENTERED.into()) && !self.said.is_empty() => {
                self.said.clone()
            }
            Ok(status) if self.said.is_empty() => format!("the daemon ended by itself ({status})"),
            Ok(status) => format!("the daemon ended by itself ({status}): {}", self.said),
            Err(error) => format!("the daemon cannot be watched: {error}"),
        }
    }
}

async fn watch(mut child: Child, mut output: pipe::Receiver, kill: CancellationToken) -> End {
    let group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let (mut said, mut killed) = (Vec::new(), false);
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            () = kill.cancelled(), if !killed => {
                killed = true;
                // Its number is nobody else's as long as nobody has waited for it.
                let _ = group.map(|group| kill_process_group(group, Signal::KILL));
            }
            open = listen(&mut output, &mut said) => if !open {
                break child.wait().await;
            }
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
    said.extend_from_slice(&heard[..count]);
    said.drain(..said.len().saturating_sub(KEPT));
    count > 0
}
