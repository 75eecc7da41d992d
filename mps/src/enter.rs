//! Internal subcommand between the supervisor and NVIDIA's program.
//!
//! The supervisor runs itself again with this subcommand, which sets up namespaces and mounts and
//! then executes the daemon, or the client that sends it a command.
//!
//! ```text
//! tessera-mps  -- spawns -->  /proc/self/exe enter  -- executes -->  nvidia-cuda-mps-control
//!                             killed with the supervisor
//!                             own mount namespace
//!                             chroot <driver-root>
//!                             tmpfs at /tmp, with pipe/ and log/; shm/ at /dev/shm
//! ```
//!
//! The driver root therefore needs no files of the supervisor, and may be mounted after it has
//! started. The mounts exist only in this namespace and disappear with the program.
//!
//! A program of its own is single-threaded and needs no unsafe code between `fork` and `exec`.

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

/// Name of the subcommand.
pub(crate) const ENTER: &str = "enter";

/// Exit code if the daemon could not be executed, as of `chroot` and `env`. Standard error has the
/// reason.
pub(crate) const NOT_ENTERED: u8 = 125;

/// Paths at which the program finds the directories of its GPU.
pub(crate) const PIPE: &str = "/tmp/nvidia-mps";
pub(crate) const LOG: &str = "/tmp/nvidia-log";
const SHM: &str = "/dev/shm";

/// Namespace to enter, and program to execute there.
#[derive(Clone, Debug, clap::Args)]
pub struct EnterArgs {
    /// PID of the supervisor, whose exit kills the daemon.
    #[arg(long)]
    supervisor: i32,
    /// Root directory of the daemon.
    #[arg(long)]
    root: PathBuf,
    /// Directory of the sockets between daemon and clients.
    #[arg(long)]
    pipe: PathBuf,
    /// Directory of the daemon's log.
    #[arg(long)]
    log: PathBuf,
    /// Directory that the daemon has at /dev/shm.
    #[arg(long)]
    shm: PathBuf,
    /// Program and arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Error that prevents the execution of the program.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// The supervisor has exited.
    #[error("tessera-mps has exited")]
    Orphaned,
    /// The supervisor lacks privileges.
    #[error(
        "permission denied to {operation}: tessera-mps needs `privileged: true` in its securityContext"
    )]
    NotAllowed {
        /// Operation that failed.
        operation: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot {operation} (--driver-root {root})", root = .root.display())]
    Kernel {
        /// Operation that failed.
        operation: &'static str,
        /// Root directory of the daemon.
        root: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The program does not exist or is not executable.
    #[error("cannot execute `{program}` in {root}: check --mps-control and --driver-root", program = .program.display(), root = .root.display())]
    Program {
        /// Value of the flag.
        program: OsString,
        /// Root directory in which it was searched.
        root: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl EnterArgs {
    /// Executes the program; returns only if that fails.
    #[must_use]
    pub fn run(self) -> ExitCode {
        let Err(error) = self.execute();
        eprintln!("{}", chain(&error));
        ExitCode::from(NOT_ENTERED)
    }

    fn execute(self) -> Result<Infallible, EnterError> {
        self.exit_with_supervisor()?;
        self.unshare_mounts()?;
        // They may have no path in the new root and below the tmpfs at /tmp.
        let [pipe, log, shm] = [
            self.clone_mount(&self.pipe)?,
            self.clone_mount(&self.log)?,
            self.clone_mount(&self.shm)?,
        ];
        if self.root != Path::new("/") {
            chroot(&self.root).map_err(self.kernel_error("change the root"))?;
        }
        chdir("/").map_err(self.kernel_error("change to the root"))?;
        self.mount_tmp()?;
        self.attach(&pipe, PIPE)?;
        self.attach(&log, LOG)?;
        self.attach(&shm, SHM)?;
        let (program, arguments) =
            self.command.split_first().expect("invariant: clap requires one");
        let source = Command::new(program).args(arguments).exec();
        Err(EnterError::Program { program: program.clone(), root: self.root, source })
    }

    /// Has the kernel kill the daemon with the supervisor. A killed supervisor sends no `quit`, and
    /// the next one cannot wait for a process that is not its child.
    fn exit_with_supervisor(&self) -> Result<(), EnterError> {
        let requested = set_parent_process_death_signal(Some(Signal::KILL));
        requested.map_err(self.kernel_error("set the parent death signal"))?;
        // The supervisor may have exited before.
        let parent = getppid().map(|parent| parent.as_raw_nonzero().get());
        if parent == Some(self.supervisor) { Ok(()) } else { Err(EnterError::Orphaned) }
    }

    fn unshare_mounts(&self) -> Result<(), EnterError> {
        unshare().map_err(self.kernel_error("unshare the mount namespace"))?;
        // Unmounts of the host propagate here; mounts made here stay here.
        let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        mount_change("/", slave).map_err(self.kernel_error("make mounts a slave"))
    }

    /// Returns a detached clone of a mount.
    fn clone_mount(&self, directory: &Path) -> Result<OwnedFd, EnterError> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        open_tree(CWD, directory, flags).map_err(self.kernel_error("clone a mount of tessera-mps"))
    }

    fn attach(&self, tree: &OwnedFd, target: &'static str) -> Result<(), EnterError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
        let moved = move_mount(tree, "", CWD, target, flags);
        moved.map_err(self.kernel_error(match target {
            SHM => "mount shm/ at /dev/shm",
            _ => "mount pipe/ and log/ in /tmp",
        }))
    }

    fn mount_tmp(&self) -> Result<(), EnterError> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        let mounted = mount("tessera-mps", "/tmp", "tmpfs", flags, c"size=16m,mode=1777");
        mounted.map_err(self.kernel_error("mount a tmpfs at /tmp"))?;
        for directory in [PIPE, LOG] {
            let made = fs::create_dir(directory);
            made.map_err(|source| self.error("make directories in /tmp", source))?;
        }
        Ok(())
    }

    fn kernel_error(
        &self,
        operation: &'static str,
    ) -> impl FnOnce(rustix::io::Errno) -> EnterError {
        move |errno| self.error(operation, errno.into())
    }

    fn error(&self, operation: &'static str, source: io::Error) -> EnterError {
        match source.kind() {
            io::ErrorKind::PermissionDenied => EnterError::NotAllowed { operation, source },
            _ => EnterError::Kernel { operation, root: self.root.clone(), source },
        }
    }
}

#[expect(
    deprecated,
    reason = "its replacement is unsafe because of CLONE_FILES, which is not used here"
)]
fn unshare() -> rustix::io::Result<()> {
    rustix::thread::unshare(UnshareFlags::NEWNS)
}
