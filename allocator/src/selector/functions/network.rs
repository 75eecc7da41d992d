//! IP addresses and networks (k8s.io/apiserver/pkg/cel/library/ip.go and cidr.go).

use std::net::IpAddr;

use super::declaration::{Declaration, Outcome, declare};
use crate::selector::cost::Cost;
use crate::selector::value::{Cidr, Value};

pub(super) const FUNCTIONS: &[Declaration] = &[
    declare("ip", &["(string) ip", "cidr.() ip"], Cost::Characters(0, 1), |a| match a {
        [Value::String(s)] => Some(address(s).map(Value::Ip)),
        [Value::Cidr(cidr)] => Some(Ok(Value::Ip(cidr.address))),
        _ => None,
    }),
    declare("isIP", &["(string) bool"], Cost::Characters(0, 1), |a| match a {
        [Value::String(s)] => Some(Ok(Value::Bool(address(s).is_ok()))),
        _ => None,
    }),
    declare("ip.isCanonical", &["(string) bool"], Cost::Characters(0, 2), |a| match a {
        [Value::String(s)] => {
            Some(address(s).map(|address| Value::Bool(address.to_string() == **s)))
        }
        _ => None,
    }),
    declare("family", &["ip.() int"], Cost::One, |a| {
        of_ip(a, |ip| Value::Int(if ip.is_ipv4() { 4 } else { 6 }))
    }),
    declare("isUnspecified", &["ip.() bool"], Cost::One, |a| {
        of_ip(a, |ip| Value::Bool(ip.is_unspecified()))
    }),
    declare("isLoopback", &["ip.() bool"], Cost::One, |a| {
        of_ip(a, |ip| Value::Bool(ip.is_loopback()))
    }),
    declare("isLinkLocalUnicast", &["ip.() bool"], Cost::One, |a| {
        of_ip(a, |ip| Value::Bool(is_link_local(ip)))
    }),
    declare("isLinkLocalMulticast", &["ip.() bool"], Cost::One, |a| {
        of_ip(a, |ip| Value::Bool(is_link_local_multicast(ip)))
    }),
    declare("isGlobalUnicast", &["ip.() bool"], Cost::One, |a| {
        of_ip(a, |ip| Value::Bool(is_global_unicast(ip)))
    }),
    declare("cidr", &["(string) cidr"], Cost::Characters(0, 1), |a| match a {
        [Value::String(s)] => Some(network(s).map(Value::Cidr)),
        _ => None,
    }),
    declare("isCIDR", &["(string) bool"], Cost::Characters(0, 1), |a| match a {
        [Value::String(s)] => Some(Ok(Value::Bool(network(s).is_ok()))),
        _ => None,
    }),
    declare("containsIP", &["cidr.(ip) bool", "cidr.(string) bool"], Cost::Characters(1, 1), |a| {
        match a {
            [Value::Cidr(cidr), Value::Ip(ip)] => Some(Ok(Value::Bool(contains(*cidr, *ip)))),
            [Value::Cidr(cidr), Value::String(s)] => {
                Some(address(s).map(|ip| Value::Bool(contains(*cidr, ip))))
            }
            _ => None,
        }
    }),
    declare(
        "containsCIDR",
        &["cidr.(cidr) bool", "cidr.(string) bool"],
        Cost::Characters(1, 1),
        |a| match a {
            [Value::Cidr(outer), Value::Cidr(inner)] => {
                Some(Ok(Value::Bool(holds(*outer, *inner))))
            }
            [Value::Cidr(outer), Value::String(s)] => {
                Some(network(s).map(|inner| Value::Bool(holds(*outer, inner))))
            }
            _ => None,
        },
    ),
    declare("masked", &["cidr.() cidr"], Cost::One, |a| match a {
        [Value::Cidr(cidr)] => {
            Some(Ok(Value::Cidr(Cidr { address: mask(cidr.address, cidr.prefix), ..*cidr })))
        }
        _ => None,
    }),
    declare("prefixLength", &["cidr.() int"], Cost::One, |a| match a {
        [Value::Cidr(cidr)] => Some(Ok(Value::Int(i64::from(cidr.prefix)))),
        _ => None,
    }),
    declare("string", &["(ip) string", "(cidr) string"], Cost::One, |a| match a {
        [Value::Ip(ip)] => Some(Ok(Value::string(ip.to_string()))),
        [Value::Cidr(cidr)] => Some(Ok(Value::string(format!("{}/{}", cidr.address, cidr.prefix)))),
        _ => None,
    }),
];

/// Parses an address. Zones and IPv4-mapped IPv6 addresses are invalid, as upstream.
fn address(text: &str) -> Result<IpAddr, String> {
    match text.parse() {
        Ok(IpAddr::V6(v6)) if v6.to_ipv4_mapped().is_some() => {
            Err(format!("IPv4-mapped IPv6 address `{text}` is not allowed"))
        }
        Ok(address) => Ok(address),
        Err(_) => Err(format!("IP Address `{text}` parse error")),
    }
}

fn network(text: &str) -> Result<Cidr, String> {
    let wrong = || format!("network address parse error: `{text}`");
    let (ip, bits) = text.split_once('/').ok_or_else(wrong)?;
    let address = address(ip)?;
    let digits = !bits.is_empty()
        && bits.bytes().all(|b| b.is_ascii_digit())
        && (bits == "0" || !bits.starts_with('0'));
    let prefix = bits.parse().ok().filter(|p| digits && *p <= width(address)).ok_or_else(wrong)?;
    Ok(Cidr { address, prefix })
}

fn of_ip(a: &[Value], f: fn(IpAddr) -> Value) -> Outcome {
    match a {
        [Value::Ip(ip)] => Some(Ok(f(*ip))),
        _ => None,
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn mask(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            IpAddr::V4((u32::from(v4) & mask).into())
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            IpAddr::V6((u128::from(v6) & mask).into())
        }
    }
}

fn contains(cidr: Cidr, ip: IpAddr) -> bool {
    cidr.address.is_ipv4() == ip.is_ipv4()
        && mask(cidr.address, cidr.prefix) == mask(ip, cidr.prefix)
}

fn holds(outer: Cidr, inner: Cidr) -> bool {
    contains(outer, mask(inner.address, inner.prefix)) && inner.prefix >= outer.prefix
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

fn is_link_local_multicast(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.segments()[0] & 0xff0f == 0xff02,
    }
}

fn is_global_unicast(ip: IpAddr) -> bool {
    let broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
    !(broadcast
        || ip.is_unspecified()
        || ip.is_loopback()
        || ip.is_multicast()
        || is_link_local(ip))
}
