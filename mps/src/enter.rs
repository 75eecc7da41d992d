//! The step between keeper and NVIDIA's program: the keeper runs itself again, as this, and this
//! becomes the daemon, or the command that speaks to it.
//!
//! ```text
//!  tessera-mps  -- spawns -->  /proc/self/exe enter  -- executes -->  nvidia-cuda-mps-control
//!                              dies with the keeper
//!                              a mount namespace of its own
//!                              chroot <driver-root>
//!                              a tmpfs at /tmp, in it pipe/ and log/; shm/ at /dev/shm
//! ```
//!
//! So the driver root needs nothing of the keeper's, and may be mounted after the keeper has
//! started: what is mounted there is only in this namespace, and goes with the program.
//!
//! A program of its own, since there is a single thread in it, and nothing between `fork` and
//! `exec` that would be unsafe.

use std::{
    convert::Infallible,
    ffi::OsString,
    fs, io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use rustix::{
    fs::CWD,
    mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change,
        move_mount, open_tree,
    },
    process::{Signal, chdir, chroot, getppid, set_parent_process_death_signal},
    thread::UnshareFlags,
};
use tessera_runtime::error_chain::chain;

/// The subcommand.
pub(crate) const ENTER: &str = "enter";

/// The exit code of a daemon that never was one, as of `chroot` and `env`; why is on standard
/// error.
pub(crate) const NOT_ENTERED: u8 = 125;

/// Where the program finds what is its GPU's.
pub(crate) const PIPE: &str = "/tmp/nvidia-mps";
pub(crate) const LOG: &str = "/tmp/nvidia-log";
const SHM: &str = "/dev/shm";

/// What to enter, and what to become there.
#[derive(Clone, Debug, clap::Args)]
pub struct Enter {
    /// The process whose end is the daemon's.
    #[arg(long)]
    keeper: i32,
    /// The root of the daemon.
    #[arg(long)]
    root: PathBuf,
    /// Where daemon and clients meet.
    #[arg(long)]
    pipe: PathBuf,
    /// Where the daemon writes its log.
    #[arg(long)]
    log: PathBuf,
    /// What the daemon sees at /dev/shm.
    #[arg(long)]
    shm: PathBuf,
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
    #[error(
        "not allowed to {operation}: the keeper needs `privileged: true` in its securityContext"
    )]
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
        self.leave_the_mount_namespace()?;
        // Behind the new root, and below the tmpfs at /tmp, they may have no path.
        let [pipe, log, shm] =
            [self.take(&self.pipe)?, self.take(&self.log)?, self.take(&self.shm)?];
        if self.root != Path::new("/") {
            chroot(&self.root).map_err(self.failed("change the root"))?;
        }
        chdir("/").map_err(self.failed("change to the root"))?;
        self.have_a_tmp_of_its_own()?;
        self.put(&pipe, PIPE)?;
        self.put(&log, LOG)?;
        self.put(&shm, SHM)?;
        let (program, arguments) = self.command.split_first().expect("invariant: clap wants one");
        let source = Command::new(program).args(arguments).exec();
        Err(EnterError::Program { program: program.clone(), root: self.root, source })
    }

    /// A keeper that is killed says `quit` to nobody, and the next could not watch what is not its
    /// child.
    fn die_with_the_keeper(&self) -> Result<(), EnterError> {
        let asked = set_parent_process_death_signal(Some(Signal::KILL));
        asked.map_err(self.failed("be told of the keeper's end"))?;
        // It may have ended before.
        let parent = getppid().map(|parent| parent.as_raw_nonzero().get());
        if parent == Some(self.keeper) { Ok(()) } else { Err(EnterError::Orphaned) }
    }

    fn leave_the_mount_namespace(&self) -> Result<(), EnterError> {
        unshare().map_err(self.failed("leave the mount namespace"))?;
        // What the host unmounts goes here, too; what is mounted here stays here.
        let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        mount_change("/", slave).map_err(self.failed("keep mounts to itself"))
    }

    /// A mount of the same, that is nowhere yet.
    fn take(&self, directory: &Path) -> Result<OwnedFd, EnterError> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        open_tree(CWD, directory, flags).map_err(self.failed("take what the keeper has mounted"))
    }

    fn put(&self, tree: &OwnedFd, target: &'static str) -> Result<(), EnterError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
        let moved = move_mount(tree, "", CWD, target, flags);
        moved.map_err(self.failed(match target {
            SHM => "mount shm/ at /dev/shm",
            _ => "mount pipe/ and log/ in /tmp",
        }))
    }

    fn have_a_tmp_of_its_own(&self) -> Result<(), EnterError> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        let mounted = mount("tessera-mps", "/tmp", "tmpfs", flags, c"size=16m,mode=1777");
        mounted.map_err(self.failed("mount a tmpfs at /tmp"))?;
        for directory in [PIPE, LOG] {
            let made = fs::create_dir(directory);
            made.map_err(|source| self.refused("make directories in /tmp", source))?;
        }
        Ok(())
    }

    fn failed(&self, operation: &'static str) -> impl FnOnce(rustix::io::Errno) -> EnterError {
        move |errno| self.refused(operation, errno.into())
    }

    fn refused(&self, operation: &'static str, source: io::Error) -> EnterError {
        match source.kind() {
            io::ErrorKind::PermissionDenied => EnterError::NotAllowed { operation, source },
            _ => EnterError::Kernel { operation, root: self.root.clone(), source },
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
