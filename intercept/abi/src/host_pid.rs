//! Protocol by which a process gets its PID of the host: it connects to the driver's socket and
//! reads [`LEN`] bytes.
//!
//! ```text
//!  process                      driver
//!  connect ------------------->  accept, SO_PEERCRED: the kernel identifies the process
//!  read 16 bytes <-------------  magic, version, PID; closes
//! ```
//!
//! There is no request: a process can neither ask about another one nor make the driver wait. A
//! protocol with requests would get a socket of its own.

/// The socket in the directory [`crate::HOST_DIR`].
pub const SOCKET: &str = "pid.sock";

/// Length of an answer.
pub const LEN: usize = 16;

const MAGIC: [u8; 8] = *b"TESHOPID";
const VERSION: u32 = 1;

/// The largest PID that Linux gives (`PID_MAX_LIMIT`).
const MOST: u32 = 1 << 22;

/// Returns the answer to a process; 0 if the driver does not see its PID.
#[must_use]
pub fn answer(pid: u32) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(&pid.to_le_bytes());
    bytes
}

/// Returns the PID in an answer. `None` if it is invalid, of another version, or 0.
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
