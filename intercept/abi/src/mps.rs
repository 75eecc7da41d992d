//! Variables that make the processes of a container clients of MPS. They are NVIDIA's; the CUDA
//! driver reads them when a process initializes it (docs.nvidia.com/deploy/mps, "Environment
//! Variables").
//!
//! A process that has none of them, or others, is no client, or not the one that its grant means.
//! Then its compute is held by the interceptor.

/// Directory of the pipes of the GPU's control daemon in a container, below [`crate::SHARES_DIR`].
/// It is no share, as [`crate::HOST_DIR`].
pub const DIR: &str = "/dev/tessera/mps";

/// The variable that says where the pipes are: [`DIR`].
pub const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The variable that says which percent of the GPU's compute a client can have at most; a number
/// above 0.
pub const ACTIVE_THREAD_PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// The variable that lets a client change its percentage from context to context.
pub const PARTITION_BY_CONTEXT: &str = "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING";

/// Returns true if these values of [`PIPE_DIRECTORY`] and [`ACTIVE_THREAD_PERCENTAGE`] make a
/// client with at most this percentage. 100 needs no limit.
#[must_use]
pub fn makes_client(
    pipe_directory: Option<&[u8]>,
    percentage: Option<&[u8]>,
    percent: u32,
) -> bool {
    pipe_directory == Some(DIR.as_bytes())
        && (percent >= 100 || percentage.and_then(rounded_up).is_some_and(|found| found <= percent))
}

/// A number above 0 as a whole percent; `None` for what is none, which MPS ignores.
fn rounded_up(text: &[u8]) -> Option<u32> {
    let text = core::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let whole: u32 = whole.parse().ok().filter(|_| is_number(whole) && is_number(fraction))?;
    let percent = whole.checked_add(u32::from(fraction.bytes().any(|byte| byte != b'0')))?;
    (percent > 0).then_some(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(directory: &str, percentage: Option<&str>, percent: u32) -> bool {
        makes_client(Some(directory.as_bytes()), percentage.map(str::as_bytes), percent)
    }

    #[test]
    fn a_client_has_the_daemon_of_its_gpu_and_no_more_than_its_grant_says() {
        for (percentage, is_client) in [
            (Some("25"), true),
            (Some("10"), true),
            (Some("24.5"), true),
            (Some("25.0"), true),
            (Some("25.1"), false),
            (Some("26"), false),
            (Some("100"), false),
            (Some("0"), false),
            (Some("-5"), false),
            (Some("+5"), false),
            (Some(""), false),
            (Some("."), false),
            (Some("many"), false),
            (Some("99999999999"), false),
            (None, false),
        ] {
            assert_eq!(client(DIR, percentage, 25), is_client, "{percentage:?}");
        }
        assert!(client(DIR, None, 100));
        assert!(!client("/tmp/nvidia-mps", Some("25"), 25) && !makes_client(None, Some(b"25"), 25));
    }
}
