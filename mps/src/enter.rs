//! The step between keeper and daemon: the keeper runs itself again, as this, and this becomes NVIDIA's program.
//!
//! ```text
//!  tessera-mps  -- spawns -->  /proc/self/exe enter  -- executes -->  nvidia-cuda-mps-control
//!                              dies with the keeper
//!                              a mount namespace of its own, shm/ over <driver-root>/dev/shm (only the daemon)
//!                              chroot <driver-root>
//! ```
//!
//! A program of its own, since there is a single thread in it, and nothing between `fork` and `exec` that would be unsafe.

use std::{
    convert::Infallible,
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use rustix::{
    mount::{MountPropagationFlags, mount_bind, mount_change},
    process::{Signal, chdir, chroot, getppid, set_parent_process_death_signal},
    thread::UnshareFlags,
};

use crate::report::chain;

/// The subcommand.
pub(crate) const ENTER: &str = "enter";

/// The exit code of a daemon that never was one, as of `chroot` and `env`; why is on standard error.
pub(crate) const NOT_ENTERED: u8 = 125;

/// What to enter, and what to become there.
#[derive(Clone, Debug, clap::Args)]
pub struct Enter {
    /// The process whose end is the daemon's.
    #[arg(long)]
    keeper: i32,
    /// The root of the daemon.
    #[arg(long)]
    root: PathBuf,
    /// What the daemon sees at /dev/shm.
    #[arg(long)]
    shm: Option<PathBuf>,
    /// The daemon's program.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Why this is not the daemon.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// Nobody wants it.
    #[error("the keeper is gone")]
    Orphaned,
    /// The keeper lacks privileges.
    #[error("not allowed to {operation}: the keeper needs `privileged: true` in its securityContext")]
    NotAllowed {
        /// What was tried.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel said no.
    #[error("failed to {operation} (--driver-root {root})", root = .root.display())]
    Kernel {
        /// What was tried.
        operation: &'static str,
        /// What the daemon was to have as its root.
        root: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// There is no such program, or it is none.
    #[error("`{program}` cannot be run in {root}: --mps-control names the program, --driver-root where it is", program = .program.display(), root = .root.display())]
    Program {
        /// As the flag says it.
        program: OsString,
        /// Where it was looked for.
        root: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Enter {
    /// Becomes the program; returns only if that fails.
    #[must_use]
    pub fn run(self) -> ExitCode {
        let Err(error) = self.become_it();
        eprintln!("{}", chain(&error));
        ExitCode::from(NOT_ENTERED)
    }

    fn become_it(self) -> Result<Infallible, EnterError> {
        self.die_with_the_keeper()?;
        if let Some(shm) = &self.shm {
            self.see_at_dev_shm(shm)?;
        }
        if self.root != Path::new("/") {
            chroot(&self.root).map_err(self.failed("change the root"))?;
        }
        chdir("/").map_err(self.failed("change to the root"))?;
        let (program, arguments) = self.command.split_first().expect("invariant: clap wants one");
        let source = Command::new(program).args(arguments).exec();
        Err(EnterError::Program { program: program.clone(), root: self.root, source })
    }

    /// A keeper that is killed says `quit` to nobody, and the next could not watch what is not its child.
    fn die_with_the_keeper(&self) -> Result<(), EnterError> {
        let asked = set_parent_process_death_signal(Some(Signal::KILL));
        asked.map_err(self.failed("be told of the keeper's end"))?;
        // It may have ended before.
        let parent = getppid().map(|parent| parent.as_raw_nonzero().get());
        if parent == Some(self.keeper) { Ok(()) } else { Err(EnterError::Orphaned) }
    }

    fn see_at_dev_shm(&self, shm: &Path) -> Result<(), EnterError> {
        unshare().map_err(self.failed("leave the mount namespace"))?;
        // What the host unmounts goes here, too; what is mounted here stays here.
        let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        mount_change("/", slave).map_err(self.failed("keep mounts to itself"))?;
        mount_bind(shm, self.root.join("dev/shm")).map_err(self.failed("mount shm/ at /dev/shm"))
    }

    fn failed(&self, operation: &'static str) -> impl FnOnce(rustix::io::Errno) -> EnterError + use<> {
        let root = self.root.clone();
        move |errno| match io::Error::from(errno) {
            source if source.kind() == io::ErrorKind::PermissionDenied => {
                EnterError::NotAllowed { operation, source }
            }
            source => EnterError::Kernel { operation, root, source },
        }
    }
}

#[expect(
    deprecated,
    reason = "its replacement is unsafe for the sake of CLONE_FILES, which nobody here asks for"
)]
fn unshare() -> rustix::io::Result<()> {
    rustix::thread::unshare(UnshareFlags::NEWNS)
}
