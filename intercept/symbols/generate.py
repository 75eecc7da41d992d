#!/usr/bin/env python3
"""Writes symbols.txt from NVIDIA's headers of every CUDA release from 11.7 on.

    ./generate.py            write symbols.txt anew
    ./generate.py --check    say whether it is what the headers say; exit 1 where it is not

The headers come with wheels of NVIDIA's on PyPI, one for each release (RELEASES). They are fetched with pip into a temporary
directory, or into --wheels DIR, where they are found again the next time; neither they nor anything but the facts below is kept.
Needs Python 3.9, pip and a C preprocessor (cc). The format of the table is described in its head (HEAD).

A new CUDA release is one line in RELEASES and a run of this; the tests of the crates that use the table then say which of its
functions nobody has looked at yet.

What comes from where:
- which symbols a release has: the declarations of cuda.h and its companions, read as the driver itself is compiled
  (__CUDA_API_VERSION_INTERNAL: every form under its own name), and of nvml.h without the renaming of unversioned names;
- the CUDA version that brought a form, and its variant: the types PFN_<base>_v<version>[_ptds|_ptsz] of cudaTypedefs.h and its
  companions;
- which form is which symbol: of one base and variant, in the order of their numbers; that the parameters agree is checked.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

# Release, wheel with cuda.h, wheel with nvml.h. There was no CUDA 12.7.
RELEASES = [
    ("11.7", "nvidia-cuda-runtime-cu11==11.7.99", "nvidia-nvml-dev-cu11==11.7.91"),
    ("11.8", "nvidia-cuda-runtime-cu11==11.8.89", "nvidia-nvml-dev-cu11==11.8.86"),
    ("12.0", "nvidia-cuda-runtime-cu12==12.0.146", "nvidia-nvml-dev-cu12==12.0.140"),
    ("12.1", "nvidia-cuda-runtime-cu12==12.1.105", "nvidia-nvml-dev-cu12==12.1.105"),
    ("12.2", "nvidia-cuda-runtime-cu12==12.2.140", "nvidia-nvml-dev-cu12==12.2.140"),
    ("12.3", "nvidia-cuda-runtime-cu12==12.3.101", "nvidia-nvml-dev-cu12==12.3.101"),
    ("12.4", "nvidia-cuda-runtime-cu12==12.4.127", "nvidia-nvml-dev-cu12==12.4.127"),
    ("12.5", "nvidia-cuda-runtime-cu12==12.5.82", "nvidia-nvml-dev-cu12==12.5.82"),
    ("12.6", "nvidia-cuda-runtime-cu12==12.6.77", "nvidia-nvml-dev-cu12==12.6.77"),
    ("12.8", "nvidia-cuda-runtime-cu12==12.8.90", "nvidia-nvml-dev-cu12==12.8.90"),
    ("12.9", "nvidia-cuda-runtime-cu12==12.9.79", "nvidia-nvml-dev-cu12==12.9.79"),
    ("13.0", "nvidia-cuda-runtime==13.0.96", "nvidia-nvml-dev==13.0.87"),
    ("13.1", "nvidia-cuda-runtime==13.1.80", "nvidia-nvml-dev==13.1.115"),
    ("13.2", "nvidia-cuda-runtime==13.2.86", "nvidia-nvml-dev==13.2.86"),
    ("13.3", "nvidia-cuda-runtime==13.3.29", "nvidia-nvml-dev==13.3.29"),
    ("13.4", "nvidia-cuda-runtime==13.4.92", "nvidia-nvml-dev==13.4.92"),
    ("13.5", "nvidia-cuda-runtime==13.5.37", "nvidia-nvml-dev==13.5.37"),
]

HEAD = """\
# The functions of libcuda.so.1 and libnvidia-ml.so.1: facts of NVIDIA's headers of CUDA {first} to {last}.
# Written by generate.py; do not edit. One line for each exported symbol, sorted by it (as bytes), seven fields:
#
#   symbol      as the library exports it
#   base        the name that cuGetProcAddress knows it by; for NVML the symbol without its _v<n>
#   version     the CUDA version that brought this form, as cuGetProcAddress counts it (1000 x major + 10 x minor); 0 for NVML
#   variant     ptds or ptsz, the form for the per-thread default stream; -
#   first       the first release whose header declares it; {first} also stands for all before it
#   last        the last release whose header declares it; drivers keep functions that headers have dropped
#   parameters  a letter for each: p pointer, h opaque handle, i integer of at most 32 bits, l integer of 64 bits, f float,
#               s structure by value; - for none
"""

# Headers that belong to the driver API. Profiler functions have a header in another wheel, but their types are here.
CUDA = ("cuda.h", "GL/gl.h", "vdpau/vdpau.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")
TYPES = ("cudaTypedefs", "cudaGLTypedefs", "cudaEGLTypedefs", "cudaVDPAUTypedefs", "cudaProfilerTypedefs")

# What those headers want of other projects' headers: types, no more.
STAND_INS = {
    "GL/gl.h": "typedef unsigned GLuint; typedef unsigned GLenum;",
    "EGL/egl.h": "typedef int EGLint; typedef unsigned EGLBoolean;",
    "EGL/eglext.h": "typedef void *EGLImageKHR; typedef void *EGLStreamKHR; typedef void *EGLSyncKHR;",
    "vdpau/vdpau.h": "typedef unsigned VdpDevice; typedef unsigned VdpVideoSurface; typedef unsigned VdpOutputSurface; "
    "typedef unsigned VdpFuncId; typedef unsigned VdpStatus; "
    "typedef VdpStatus (*VdpGetProcAddress)(VdpDevice, VdpFuncId, void **);",
}

INTEGERS = {
    "char": "i", "short": "i", "int": "i", "unsigned": "i", "signed": "i", "long": "l", "float": "f", "_Bool": "i",
    "uint8_t": "i", "uint16_t": "i", "uint32_t": "i", "int32_t": "i", "uint64_t": "l", "int64_t": "l", "size_t": "l",
}  # fmt: skip


def fetch(wheel, into):
    """The wheel's file; fetched where it is not there yet."""
    name, version = wheel.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(into.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform=manylinux1_x86_64", "--platform=manylinux2014_x86_64", f"--dest={into}", wheel]
        subprocess.run(command, check=True)
    [found] = into.glob(pattern)
    return found


def unpack(wheel, into):
    """Puts the wheel's headers into one directory."""
    into.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".h"):
                (into / pathlib.PurePath(name).name).write_bytes(archive.read(name))


def preprocess(header, defines, includes):
    command = ["cc", "-E", "-P", "-x", "c", *(f"-D{define}" for define in defines)]
    command += [f"-I{directory}" for directory in includes]
    return subprocess.run([*command, str(header)], check=True, capture_output=True, text=True).stdout


def statements(code):
    """The statements at the top level, each on a line, with what is in braces; of a function that is defined, its head."""
    code = re.sub(r"^\s*#.*$", "", code, flags=re.M)
    code = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)|__extension__|__inline\w*", " ", code)
    depth, start = 0, 0
    for at, letter in enumerate(code):
        depth += (letter in "{(") - (letter in "})")
        if depth != 0 or letter not in ";}":
            continue
        statement = " ".join(code[start:at].split())
        head, brace, _ = statement.partition(") {")
        if letter == ";" or brace:
            yield head + ")" if brace and not head.startswith("typedef") else statement
            start = at + 1


class Types:
    """How values of the types of a header are passed."""

    def __init__(self, code):
        self.classes = {}
        for statement in statements(code):
            if statement.startswith("typedef "):
                self.define(statement[len("typedef ") :])

    def define(self, text):
        if function := re.match(r"[^{]*\(\s*\*\s*(\w+)\s*\)\s*\(", text):
            self.classes[function[1]] = "p"
            return
        body = re.match(r"((?:enum|struct|union)\b[^{]*)\{(.*)\}(.*)", text)
        if body:
            kind = "i" if body[1].startswith("enum") else "s"
            # A handle in a structure of its own is passed as the handle is.
            members = [member for member in body[2].split(";") if member.strip()]
            if body[1].startswith("struct") and len(members) == 1 and re.match(r"\s*struct \w+\s*\*", members[0]):
                kind = "h"
            names = body[3]
        else:
            kind, names = None, text
        for position, name in enumerate(names.split(",")):
            declared = re.search(r"(\w+)\s*((?:\[.*\])?)\s*$", name)
            if kind is None and position == 0:
                before = name[: declared.start()].strip()
                opaque = re.match(r"(const )?struct \w+\s*\*$", before)
                kind = "h" if opaque else self.of_type(before)
            self.classes[declared[1]] = "p" if "*" in name and body else kind

    def of_type(self, text):
        """The class of a type without a name behind it."""
        if "*" in text or "[" in text:
            return "p"
        words = [word for word in re.findall(r"\w+", text) if word not in ("const", "volatile")]
        if words[0] in ("struct", "union"):
            return "s"
        if words[0] == "enum":
            return "i"
        if words[-1] in self.classes:
            return self.classes[words[-1]]
        classes = {INTEGERS.get(word) for word in words}
        if None in classes:
            raise KeyError(f"unknown type: {text}")
        return "f" if "f" in classes else "l" if "l" in classes else "i"

    def of_parameter(self, text):
        """The class of a parameter, which may have a name."""
        words = re.findall(r"\w+", text)
        named = len(words) > 1 and words[-1] not in self.classes and words[-1] not in INTEGERS
        return self.of_type(re.sub(r"\w+\s*$", "", text) if named and not text.rstrip().endswith("*") else text)

    def of_parameters(self, text):
        depth, part, parts = 0, "", []
        for letter in text:
            depth += (letter == "(") - (letter == ")")
            if letter == "," and depth == 0:
                parts.append(part)
                part = ""
            else:
                part += letter
        parts.append(part)
        if [part.strip() for part in parts] in ([""], ["void"]):
            return "-"
        return "".join("p" if "(" in part else self.of_parameter(part.strip()) for part in parts)


def declarations(code, types, result, prefix):
    """The functions that are declared, and the classes of their parameters."""
    found = {}
    pattern = re.compile(rf"(?:^|\s)(?:{result})\s*({prefix}\w+)\s*\((.*)\)$")
    for statement in statements(code):
        declared = pattern.search(statement)
        if declared and not statement.startswith("typedef"):
            found[declared[1]] = types.of_parameters(declared[2])
    return found


def read_cuda(headers):
    """Of one release: its symbols with their parameters, and its forms (base, version, variant) with theirs."""
    symbols, forms = {}, {}
    includes = [headers, headers / "stand-ins"]
    unit = headers / "unit.c"
    unit.write_text("".join(f"#include <{name}>\n" for name in CUDA))
    code = preprocess(unit, ["__CUDA_API_VERSION_INTERNAL"], includes)
    symbols |= declarations(code, Types(code), "CUresult", "cu")
    # Not declared but defined: programs for the per-thread default stream get it, and bindings look it up.
    code = preprocess(unit, ["CUDA_API_PER_THREAD_DEFAULT_STREAM"], includes)
    inline = [statement for statement in statements(code) if statement.startswith("static inline CUresult cu")]
    symbols |= declarations(";".join(inline) + ";", Types(code), "CUresult", "cu")
    for name in TYPES:
        source = headers / f"{name}.h"
        # The types of the profiler's header, which is elsewhere.
        raw = re.sub(r'#include\s*[<"]cudaProfiler\.h[>"]', "", source.read_text())
        (headers / "types.h").write_text("#include <cuda.h>\ntypedef enum { CU_OUT } CUoutput_mode;\n" + raw)
        code = preprocess(headers / "types.h", ["__CUDA_API_VERSION_INTERNAL"], includes)
        types = Types(code)
        found = re.findall(r"typedef CUresult\s*\(\s*\*\s*PFN_(cu\w+?)_v(\d{4,5})(?:_(pt[ds][sz]))?\)\s*\(([^;]*)\);", code)
        for base, version, variant, arguments in found:
            forms[base, int(version), variant or "-"] = types.of_parameters(arguments)
            if name == "cudaProfilerTypedefs":
                symbols[base] = types.of_parameters(arguments)
    return symbols, forms


def read_nvml(headers):
    code = preprocess(headers / "nvml.h", ["NVML_NO_UNVERSIONED_FUNC_DEFS"], [headers])
    plain = preprocess(headers / "nvml.h", [], [headers])
    result = r"nvmlReturn_t|const char\s*\*"
    return declarations(plain, Types(plain), result, "nvml") | declarations(code, Types(code), result, "nvml")


def split(symbol):
    """Base, number and variant of a symbol."""
    base, number, variant = re.fullmatch(r"(\w+?)(?:_v(\d+))?(?:_(ptds|ptsz))?", symbol).groups()
    return base, int(number or 1), variant or "-"


def pair(symbols, forms):
    """The form of each symbol."""
    versions, paired = {}, {}
    for base, version, variant in sorted(forms):
        versions.setdefault((base, variant), []).append(version)
    for symbol in sorted(symbols, key=split):
        base, _, variant = split(symbol)
        if (base, variant) in versions:
            if not versions[base, variant]:
                raise SystemExit(f"{symbol}: no header says which CUDA version brought it")
            version = versions[base, variant].pop(0)
            agree = forms[base, version, variant]
        else:
            # Defined inline in cuda.h: a call of the form without a variant.
            plain = symbol.removesuffix(f"_{variant}")
            version, agree = paired[plain][1], symbols[plain]
        if agree != symbols[symbol]:
            raise SystemExit(f"{symbol} takes {symbols[symbol]}, but {base} of {version} takes {agree}")
        paired[symbol] = (base, version, variant)
    if left := {key: left for key, left in versions.items() if left}:
        raise SystemExit(f"forms without a symbol: {left}")
    return paired


def number(release):
    major, minor = release.split(".")
    return 1000 * int(major) + 10 * int(minor)


def collect(wheels, work):
    cuda, forms, nvml, seen = {}, {}, {}, {}
    for release, cuda_wheel, nvml_wheel in RELEASES:
        headers = work / release
        unpack(fetch(cuda_wheel, wheels), headers)
        unpack(fetch(nvml_wheel, wheels), headers)
        for name, text in STAND_INS.items():
            path = headers / "stand-ins" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        symbols, of_release = read_cuda(headers)
        forms |= of_release
        functions = read_nvml(headers)
        for symbol, parameters in (symbols | functions).items():
            seen.setdefault(symbol, []).append(release)
            before = (cuda | nvml).get(symbol, parameters)
            if before != parameters:
                print(f"note: {symbol} took {before}, and takes {parameters} since {release}", file=sys.stderr)
        cuda |= symbols
        nvml |= functions
        print(f"{release}: {len(symbols)} CUDA, {len(functions)} NVML", file=sys.stderr)
    return cuda, forms, nvml, seen


def table(cuda, forms, nvml, seen):
    lines = [HEAD.format(first=RELEASES[0][0], last=RELEASES[-1][0])]
    paired = pair(cuda, forms)
    for symbol in sorted(cuda | nvml):
        base, version, variant = paired.get(symbol) or (split(symbol)[0], 0, "-")
        first, last = seen[symbol][0], seen[symbol][-1]
        if version > number(first):
            raise SystemExit(f"{symbol} of CUDA {version} is in the header of {first}")
        parameters = (cuda | nvml)[symbol]
        lines.append(f"{symbol} {base} {version} {variant} {first} {last} {parameters}\n")
    return "".join(lines)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments.add_argument("--wheels", type=pathlib.Path, help="where the wheels are, or are to be put")
    arguments = arguments.parse_args()
    target = pathlib.Path(__file__).with_name("symbols.txt")
    with tempfile.TemporaryDirectory() as work:
        wheels = arguments.wheels or pathlib.Path(work)
        text = table(*collect(wheels, pathlib.Path(work)))
    if not arguments.check:
        target.write_text(text)
    elif target.read_text() != text:
        here, there = set(target.read_text().splitlines()), set(text.splitlines())
        for line in sorted(here ^ there):
            print("-" if line in here else "+", line)
        raise SystemExit(f"{target} is not what the headers say; run {__file__}")


if __name__ == "__main__":
    main()
