//! The certificates of the webhook, and their rotation.
//!
//! Each certificate has a certificate authority of its own, whose key is thrown away after the
//! signature, so no key that could sign others is stored. A rotation takes three steps, between
//! which every served certificate is trusted:
//!
//! | step | Secret | caBundle |
//! |---|---|---|
//! | 1: a third of the lifetime is left | next pair beside the served one | both authorities |
//! | 2: [`TRUST_DELAY`] after that | next pair becomes the served one | both authorities |
//! | 3: the old authority has expired | | new authority |
//!
//! Time is that of the caller. A certificate is valid from [`BACKDATE`] before it was made, so that
//! a kube-apiserver whose clock is behind accepts it. A pair from a clock that was ahead, which is
//! not valid yet, is replaced at once.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use time::OffsetDateTime;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// Lifetime of a certificate, in seconds.
pub const LIFETIME: i64 = 90 * DAY;

/// Time before its making from which a certificate is valid, in seconds.
pub const BACKDATE: i64 = DAY;

/// Time for which the next certificate's authority is in the caBundle before the certificate is
/// served, in seconds. kube-apiserver reads a changed configuration within seconds.
pub const TRUST_DELAY: i64 = 3600;

const DAY: i64 = 24 * 3600;

/// Keys of the Secret. The first three are those of Kubernetes' and cert-manager's TLS Secrets.
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITIES: &str = "ca.crt";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

/// End of a certificate in PEM.
const PEM_END: &str = "-----END CERTIFICATE-----";

/// Errors of certificates.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A key of the Secret is missing, or not text.
    #[error("data[{key}]: expected PEM")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A certificate or key does not parse.
    #[error("data[{key}]: {problem}")]
    Invalid {
        /// The key.
        key: &'static str,
        /// The problem.
        problem: String,
    },
    /// A certificate cannot be made.
    #[error("cannot make a certificate")]
    Issue(#[from] rcgen::Error),
}

/// A certificate, and its key. In PEM.
#[derive(Clone, PartialEq, Eq)]
struct Pair {
    certificate: String,
    key: String,
    validity: Validity,
    dns_names: Vec<String>,
}

impl std::fmt::Debug for Pair {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair").field("validity", &self.validity).finish_non_exhaustive()
    }
}

/// A certificate authority. In PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Authority {
    certificate: String,
    validity: Validity,
}

/// Time in which a certificate is valid, in seconds since the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// First second.
    pub not_before: i64,
    /// Last second.
    pub not_after: i64,
}

impl Validity {
    /// Returns true if the time is within.
    #[must_use]
    pub fn contains(self, now: i64) -> bool {
        (self.not_before..=self.not_after).contains(&now)
    }
}

/// The content of the Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificates {
    served: Pair,
    next: Option<Pair>,
    authorities: Vec<Authority>,
}

impl Certificates {
    /// Reads the data of the Secret, of this crate or of cert-manager.
    ///
    /// # Errors
    /// [`CertificateError`], with the key.
    pub fn from_secret(data: &BTreeMap<String, ByteString>) -> Result<Self, CertificateError> {
        let served = pair(data, CERTIFICATE, KEY)?;
        let has_next = data.contains_key(NEXT_CERTIFICATE);
        let next = has_next.then(|| pair(data, NEXT_CERTIFICATE, NEXT_KEY)).transpose()?;
        let bundle = if data.contains_key(AUTHORITIES) { text(data, AUTHORITIES)? } else { "" };
        let mut authorities = Vec::new();
        for certificate in bundle.split_inclusive(PEM_END).filter(|text| text.contains(PEM_END)) {
            let der = CertificateDer::from_pem_slice(certificate.as_bytes())
                .map_err(|error| invalid(AUTHORITIES, error))?;
            let (validity, _) = parsed(AUTHORITIES, &der)?;
            authorities.push(Authority { certificate: lines(certificate), validity });
        }
        Ok(Self { served, next, authorities })
    }

    /// Returns the data of the Secret.
    #[must_use]
    pub fn to_secret(&self) -> BTreeMap<String, ByteString> {
        let mut data = BTreeMap::from([
            (CERTIFICATE, self.served.certificate.clone()),
            (KEY, self.served.key.clone()),
            (AUTHORITIES, self.ca_bundle()),
        ]);
        if let Some(next) = &self.next {
            data.insert(NEXT_CERTIFICATE, next.certificate.clone());
            data.insert(NEXT_KEY, next.key.clone());
        }
        let bytes = |(key, text): (&str, String)| (key.to_owned(), ByteString(text.into_bytes()));
        data.into_iter().map(bytes).collect()
    }

    /// Returns the authorities that a client has to trust, in PEM.
    #[must_use]
    pub fn ca_bundle(&self) -> String {
        self.authorities.iter().map(|authority| authority.certificate.as_str()).collect()
    }

    /// Returns the validity of the served certificate.
    #[must_use]
    pub fn validity(&self) -> Validity {
        self.served.validity
    }

    /// Returns the served certificate for TLS.
    ///
    /// # Errors
    /// [`CertificateError::Invalid`] if the key is of a kind that ring does not sign with, or not
    /// that of the certificate.
    pub fn certified_key(&self) -> Result<CertifiedKey, CertificateError> {
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(self.served.certificate.as_bytes()).collect();
        let chain = chain.map_err(|error| invalid(CERTIFICATE, error))?;
        let key = PrivateKeyDer::from_pem_slice(self.served.key.as_bytes())
            .map_err(|error| invalid(KEY, error))?;
        let key = any_supported_type(&key).map_err(|error| invalid(KEY, error))?;
        let certified = CertifiedKey::new(chain, key);
        certified.keys_match().map_err(|error| invalid(KEY, error))?;
        Ok(certified)
    }

    /// Returns the certificates that `current` has to be replaced by; `None` if it stays.
    ///
    /// `published` is the caBundle that clients trust now. The certificate is for `dns_name`, `now`
    /// is in seconds since the epoch.
    ///
    /// # Errors
    /// [`CertificateError::Issue`].
    pub fn renewed(
        current: Option<&Self>,
        dns_name: &str,
        published: Option<&str>,
        now: i64,
    ) -> Result<Option<Self>, CertificateError> {
        let Some(current) = current else { return Self::issued(dns_name, now).map(Some) };
        let is_usable =
            |pair: &Pair| pair.validity.contains(now) && pair.dns_names == [dns_name.to_owned()];
        let mut renewed = current.clone();
        renewed.authorities.retain(|authority| authority.validity.contains(now));
        renewed.next = renewed.next.filter(is_usable);
        let is_trusted = published == Some(current.ca_bundle().as_str());
        let is_served_usable = is_usable(&current.served) && !renewed.authorities.is_empty();
        match renewed.next.take() {
            // The served one is refused anyway.
            Some(next) if !is_served_usable => renewed.served = next,
            None if !is_served_usable => return Self::issued(dns_name, now).map(Some),
            Some(next) if is_trusted && now >= made(&next) + TRUST_DELAY => renewed.served = next,
            Some(next) => renewed.next = Some(next),
            None if current.served.validity.not_after - now < LIFETIME / 3 => {
                let issued = Self::issued(dns_name, now)?;
                renewed.next = Some(issued.served);
                renewed.authorities.extend(issued.authorities);
            }
            None => {}
        }
        Ok((renewed != *current).then_some(renewed))
    }

    /// Makes an authority and a certificate.
    fn issued(dns_name: &str, now: i64) -> Result<Self, CertificateError> {
        let validity = Validity { not_before: now - BACKDATE, not_after: now + LIFETIME };
        let mut authority = parameters(vec![], "tessera-webhook-ca", validity)?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority_key = KeyPair::generate()?;
        let authority_certificate = authority.self_signed(&authority_key)?;
        let mut served = parameters(vec![dns_name.to_owned()], "tessera-webhook", validity)?;
        served.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        served.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        served.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = served.signed_by(&key, &Issuer::new(authority, authority_key))?;
        Ok(Self {
            served: Pair {
                certificate: lines(&certificate.pem()),
                key: key.serialize_pem(),
                validity,
                dns_names: vec![dns_name.to_owned()],
            },
            next: None,
            authorities: vec![Authority {
                certificate: lines(&authority_certificate.pem()),
                validity,
            }],
        })
    }
}

/// Returns the time at which this crate made a pair, in seconds since the epoch.
fn made(pair: &Pair) -> i64 {
    pair.validity.not_before + BACKDATE
}

fn parameters(
    dns_names: Vec<String>,
    common_name: &str,
    validity: Validity,
) -> Result<CertificateParams, CertificateError> {
    let mut parameters = CertificateParams::new(dns_names)?;
    parameters.distinguished_name.push(DnType::CommonName, common_name);
    parameters.not_before = date(validity.not_before);
    parameters.not_after = date(validity.not_after);
    Ok(parameters)
}

/// Returns the date; one that X.509 cannot express is the epoch, which is refused later as expired.
fn date(seconds: i64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

fn pair(
    data: &BTreeMap<String, ByteString>,
    certificate: &'static str,
    key: &'static str,
) -> Result<Pair, CertificateError> {
    let (chain, key) = (text(data, certificate)?, text(data, key)?);
    let first = CertificateDer::pem_slice_iter(chain.as_bytes()).next();
    let first = first.ok_or(CertificateError::Missing { key: certificate })?;
    let first = first.map_err(|error| invalid(certificate, error))?;
    let (validity, dns_names) = parsed(certificate, &first)?;
    Ok(Pair { certificate: chain.to_owned(), key: key.to_owned(), validity, dns_names })
}

fn text<'d>(
    data: &'d BTreeMap<String, ByteString>,
    key: &'static str,
) -> Result<&'d str, CertificateError> {
    let bytes = data.get(key).ok_or(CertificateError::Missing { key })?;
    std::str::from_utf8(&bytes.0).map_err(|_| CertificateError::Missing { key })
}

/// Returns the validity of a certificate, and the DNS names that it is for.
fn parsed(
    key: &'static str,
    certificate: &CertificateDer<'_>,
) -> Result<(Validity, Vec<String>), CertificateError> {
    let (_, certificate) =
        X509Certificate::from_der(certificate).map_err(|error| invalid(key, error))?;
    let validity = certificate.validity();
    let names = certificate.subject_alternative_name().map_err(|error| invalid(key, error))?;
    let names = names.iter().flat_map(|extension| &extension.value.general_names);
    let dns_names = names.filter_map(|name| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    });
    let validity = Validity {
        not_before: validity.not_before.timestamp(),
        not_after: validity.not_after.timestamp(),
    };
    Ok((validity, dns_names.collect()))
}

fn invalid(key: &'static str, problem: impl std::fmt::Display) -> CertificateError {
    CertificateError::Invalid { key, problem: problem.to_string() }
}

/// Returns a text that begins and ends with a line.
fn lines(text: &str) -> String {
    format!("{}\n", text.trim())
}
