//! Flags of tessera-mps. Each is also an environment variable.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{ArgAction, Parser, Subcommand};
use jiff::SignedDuration;
use tessera_runtime::log::LogFormat;

use crate::{enter::EnterArgs, shm::ShmSize};

/// Supervises the MPS control daemons of one node. It starts one for each GPU that tessera-driver
/// requests one for, restarts those that fail, and stops those that are no longer used. Runs as
/// root, in the host's PID namespace, with the permission to mount (privileged: true).
///
/// Stopping this program stops the daemons, and with them the processes on their GPUs. Update it
/// only while no claim shares a GPU by MPS.
#[derive(Clone, Debug, Parser)]
#[command(name = "tessera-mps", version, disable_help_subcommand = true)]
pub struct MpsArgs {
    /// State directory of tessera-driver (its --state-dir), which also has the daemons' files. It
    /// must be a tmpfs, at the same path on the host, with bidirectional mount propagation.
    #[arg(long, env = "TESSERA_STATE_DIR", default_value = "/run/tessera")]
    pub state_dir: PathBuf,

    /// Root of the NVIDIA driver's files. Daemons run in it by chroot, and --mps-control is
    /// searched there. It must have /tmp and /dev/shm, over which each daemon has its own mounts.
    /// It may be mounted after this program has started.
    #[arg(long, env = "TESSERA_DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,

    /// NVIDIA's MPS control program: a path below --driver-root, or a name in PATH there. It
    /// cannot be below /tmp or /dev/shm, which each daemon's own mounts hide.
    #[arg(
        long,
        env = "TESSERA_MPS_CONTROL",
        value_name = "PROGRAM",
        default_value = "nvidia-cuda-mps-control"
    )]
    pub mps_control: OsString,

    /// Serve the processes of all users at the same time (-M of nvidia-cuda-mps-control). If
    /// false, processes of a second user wait until those of the first have exited.
    #[arg(long, env = "TESSERA_MPS_MULTI_USER", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub multi_user: bool,

    /// Maximum size of the /dev/shm that the tenants of one GPU share with their daemon: a
    /// quantity such as 8Gi, a number of bytes, or a percentage of the node's memory. No
    /// memory is reserved. Running daemons keep their size.
    #[arg(long, env = "TESSERA_MPS_SHM_SIZE", value_name = "SIZE", default_value_t)]
    pub shm_size: ShmSize,

    /// Pause between reads of the wanted GPUs.
    #[arg(long, env = "TESSERA_MPS_POLL_INTERVAL", value_name = "DURATION", default_value = "200ms", value_parser = duration)]
    pub poll_interval: Duration,

    /// Pause between health checks of a ready daemon. After three failed checks in a row it is
    /// killed and restarted.
    #[arg(long, env = "TESSERA_MPS_HEALTH_INTERVAL", value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub health_interval: Duration,

    /// Timeout of a health check.
    #[arg(long, env = "TESSERA_MPS_ANSWER_TIMEOUT", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub answer_timeout: Duration,

    /// Timeout of a daemon's start: without a response until then, it is killed and restarted.
    #[arg(long, env = "TESSERA_MPS_START_TIMEOUT", value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub start_timeout: Duration,

    /// Timeout of a daemon's stop: if it has not exited by then, it is killed.
    #[arg(long, env = "TESSERA_MPS_STOP_TIMEOUT", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub stop_timeout: Duration,

    /// Format of log lines. RUST_LOG sets the log level.
    #[arg(long, env = "TESSERA_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,

    /// Internal subcommand that the supervisor runs itself with.
    #[command(subcommand)]
    pub stage: Option<SupervisorStage>,
}

/// Internal subcommand that the supervisor runs itself with.
#[derive(Clone, Debug, Subcommand)]
pub enum SupervisorStage {
    /// Becomes the daemon.
    #[command(hide = true)]
    Enter(EnterArgs),
}

fn duration(text: &str) -> Result<Duration, &'static str> {
    let duration =
        text.parse::<SignedDuration>().ok().and_then(|duration| Duration::try_from(duration).ok());
    duration
        .filter(|duration| !duration.is_zero())
        .ok_or("invalid duration: use a value such as 200ms, 10s or 1m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        use clap::CommandFactory;
        MpsArgs::command().debug_assert();
    }

    #[test]
    fn duration_needs_unit_and_is_not_zero() {
        let parse =
            |text: &str| MpsArgs::try_parse_from(["tessera-mps", "--health-interval", text]);
        for (text, millis) in [("200ms", 200), ("10s", 10_000), ("1m 30s", 90_000)] {
            assert_eq!(parse(text).expect(text).health_interval, Duration::from_millis(millis));
        }
        for text in ["", "0s", "10", "soon"] {
            assert!(parse(text).expect_err(text).to_string().contains("such as 200ms"), "{text}");
        }
    }

    #[test]
    fn daemons_serve_all_users_by_default() {
        let parse = |flags: &[&str]| {
            MpsArgs::try_parse_from([&["tessera-mps"], flags].concat()).expect("flags")
        };
        assert!(parse(&[]).multi_user);
        assert!(!parse(&["--multi-user=false"]).multi_user);
        assert_eq!(parse(&[]).shm_size, ShmSize::Percent(50));
    }

    #[test]
    fn help_hides_internal_subcommand() {
        use clap::CommandFactory;
        let help = MpsArgs::command().render_long_help().to_string();
        assert!(!help.contains("enter") && help.contains("--mps-control"), "{help}");
    }
}
