//! The admission webhook, as far as it does I/O. [`tessera_admission`] decides.
//!
//! | part | runs in | does |
//! |---|---|---|
//! | [`settings`] | every replica, once | reads the settings of the dialects |
//! | [`certificate`] | every replica | follows the Secret, and gives its certificate to TLS |
//! | [`serve`] | every replica, a thread of its own | answers reviews |
//! | [`publish`] | the leader | writes the Secret, the configuration and the data of the guard |
//!
//! The three objects exist by the chart, so that they are gone with it; the controller may not
//! create them.

pub mod certificate;
pub mod publish;
pub mod serve;
pub mod settings;
