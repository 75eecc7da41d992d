//! Flags. Each is also an environment variable.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{ArgAction, Parser, Subcommand};
use jiff::SignedDuration;
use tessera_runtime::log::LogFormat;

use crate::{enter::Enter, shm::ShmSize};

/// Keeps the MPS control daemons of one node: starts one for each GPU that tessera-driver wants one
/// for, restarts those that fail, and stops those that nobody wants any more. Runs as root, in the
/// host's PID namespace, with the right to mount (privileged: true).
///
/// Stopping this program stops the daemons, and so what runs on their GPUs: update it only where no
/// claim shares by MPS.
#[derive(Clone, Debug, Parser)]
#[command(name = "tessera-mps", version, disable_help_subcommand = true)]
pub struct Args {
    /// Where tessera-driver says what is wanted (its --state-dir), and where the daemons' files
    /// are: on a tmpfs, at the same path on the host, mounts propagating both ways.
    #[arg(long, env = "TESSERA_STATE_DIR", default_value = "/run/tessera")]
    pub state_dir: PathBuf,

    /// Root of the NVIDIA driver's files: daemons run in it by chroot, and --mps-control is
    /// searched for there. Needs /tmp and /dev/shm, over which each daemon has its own mounts;
    /// it may be mounted after this program has started.
    #[arg(long, env = "TESSERA_DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,

    /// The daemon's program, NVIDIA's: a path below --driver-root, or a name that is in PATH
    /// there. Not below /tmp or /dev/shm: each daemon's own mounts hide what is there.
    #[arg(
        long,
        env = "TESSERA_MPS_CONTROL",
        value_name = "PROGRAM",
        default_value = "nvidia-cuda-mps-control"
    )]
    pub mps_control: OsString,

    /// Serve the processes of all users at once (-M of nvidia-cuda-mps-control). With false,
    /// processes of a second user wait until those of the first are gone.
    #[arg(long, env = "TESSERA_MPS_MULTI_USER", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub multi_user: bool,

    /// How much the tenants of one GPU may have in /dev/shm together, which they share with their
    /// daemon: an amount such as 8Gi, bytes, or a share of the machine's memory. Nothing is
    /// set aside. Daemons that are there keep what they have.
    #[arg(long, env = "TESSERA_MPS_SHM_SIZE", value_name = "SIZE", default_value_t)]
    pub shm_size: ShmSize,

    /// How often to look at what is wanted.
    #[arg(long, env = "TESSERA_MPS_POLL_INTERVAL", value_name = "DURATION", default_value = "200ms", value_parser = duration)]
    pub poll_interval: Duration,

    /// How often a daemon that is ready is asked whether it still answers. After three times in a
    /// row without an answer it is killed and started again.
    #[arg(long, env = "TESSERA_MPS_HEALTH_INTERVAL", value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub health_interval: Duration,

    /// How long an answer may take.
    #[arg(long, env = "TESSERA_MPS_ANSWER_TIMEOUT", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub answer_timeout: Duration,

    /// How long a daemon may take to its first answer, before it is killed and started again.
    #[arg(long, env = "TESSERA_MPS_START_TIMEOUT", value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub start_timeout: Duration,

    /// How long a daemon may take to quit, before it is killed.
    #[arg(long, env = "TESSERA_MPS_STOP_TIMEOUT", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub stop_timeout: Duration,

    /// How log lines are written. What is logged is set by RUST_LOG.
    #[arg(long, env = "TESSERA_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,

    /// What the keeper runs itself as.
    #[command(subcommand)]
    pub stage: Option<Stage>,
}

/// What the keeper runs itself as.
#[derive(Clone, Debug, Subcommand)]
pub enum Stage {
    /// Becomes a daemon.
    #[command(hide = true)]
    Enter(Enter),
}

fn duration(text: &str) -> Result<Duration, &'static str> {
    let duration =
        text.parse::<SignedDuration>().ok().and_then(|duration| Duration::try_from(duration).ok());
    duration.filter(|duration| !duration.is_zero()).ok_or("write a time such as 200ms, 10s or 1m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn times_are_written_with_their_unit_and_are_not_none() {
        let parse = |text: &str| Args::try_parse_from(["tessera-mps", "--health-interval", text]);
        for (text, millis) in [("200ms", 200), ("10s", 10_000), ("1m 30s", 90_000)] {
            assert_eq!(parse(text).expect(text).health_interval, Duration::from_millis(millis));
        }
        for text in ["", "0s", "10", "soon"] {
            assert!(parse(text).expect_err(text).to_string().contains("such as 200ms"), "{text}");
        }
    }

    #[test]
    fn daemons_serve_all_users_unless_told_otherwise() {
        let parse = |flags: &[&str]| {
            Args::try_parse_from([&["tessera-mps"], flags].concat()).expect("flags")
        };
        assert!(parse(&[]).multi_user);
        assert!(!parse(&["--multi-user=false"]).multi_user);
        assert_eq!(parse(&[]).shm_size, ShmSize::Percent(50));
    }

    #[test]
    fn what_the_keeper_runs_itself_as_is_not_for_people() {
        use clap::CommandFactory;
        let help = Args::command().render_long_help().to_string();
        assert!(!help.contains("enter") && help.contains("--mps-control"), "{help}");
    }
}
