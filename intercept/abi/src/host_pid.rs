//! How a process learns what the host calls it: it connects to the driver's socket and reads
//! [`LEN`] bytes.
//!
//! ```text
//!  process                      driver
//!  connect ------------------->  accept, SO_PEERCRED: the kernel says who it is
//!  read 16 bytes <-------------  magic, version, PID; closes
//! ```
//!
//! There is no question: who asks can neither choose whom it asks about nor keep the driver
//! waiting. What needs one, some day, gets a socket of its own.

/// The socket in the directory [`crate::HOST_DIR`].
pub const SOCKET: &str = "pid.sock";

/// Length of an answer.
pub const LEN: usize = 16;

const MAGIC: [u8; 8] = *b"TESHOPID";
const VERSION: u32 = 1;

/// The largest PID that Linux gives (`PID_MAX_LIMIT`).
const MOST: u32 = 1 << 22;

/// The answer to a process; 0 where the driver does not see it.
#[must_use]
pub fn answer(pid: u32) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(&pid.to_le_bytes());
    bytes
}

/// The PID in an answer. `None` for one that makes no sense, is of another version, or says that
/// the driver does not see the process.
#[must_use]
pub fn parse(answer: &[u8; LEN]) -> Option<u32> {
    let [magic @ .., v0, v1, v2, v3, p0, p1, p2, p3] = *answer;
    let (version, pid) =
        (u32::from_le_bytes([v0, v1, v2, v3]), u32::from_le_bytes([p0, p1, p2, p3]));
    (magic == MAGIC && version == VERSION && pid != 0 && pid <= MOST).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_sixteen_bytes_that_say_one_number() {
        let bytes = answer(0x0001_0203);
        assert_eq!(bytes, *b"TESHOPID\x01\0\0\0\x03\x02\x01\0");
        assert_eq!(parse(&bytes), Some(0x0001_0203));
    }

    #[test]
    fn what_is_no_answer_says_nothing() {
        assert_eq!(parse(&answer(0)), None, "the driver does not see it");
        assert_eq!(parse(&answer(MOST)), Some(MOST));
        assert_eq!(parse(&answer(MOST + 1)), None, "no PID");
        for at in 0..12 {
            let mut other = answer(7);
            other[at] ^= 1;
            assert_eq!(parse(&other), None, "byte {at}");
        }
    }
}
