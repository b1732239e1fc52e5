"""Recorded output of macOS' own programs, in the shapes that a fleet really has."""

from __future__ import annotations

import json
from typing import Any

AIR = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\toptions=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
\tinet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
\tnd6 options=201<PERFORMNUD,DAD>
gif0: flags=8010<POINTOPOINT,MULTICAST> mtu 1280
stf0: flags=0<> mtu 1280
anpi0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=400<CHANNEL_IO>
\tether 2a:c1:5e:00:00:01
\tinet6 fe80::28c1:5eff:fe00:1%anpi0 prefixlen 64 scopeid 0x4
\tnd6 options=201<PERFORMNUD,DAD>
\tmedia: none
\tstatus: inactive
en1: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\toptions=460<TSO4,TSO6,CHANNEL_IO>
\tether 36:8e:11:00:00:40
\tmedia: autoselect <full-duplex>
\tstatus: inactive
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=63<RXCSUM,TXCSUM,TSO4,TSO6>
\tether 36:8e:11:00:00:40
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\t\tipfilter disabled flags 0x0
\tmember: en1 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 10 priority 0 path cost 0
\tmedia: <unknown type>
\tstatus: inactive
ap1: flags=8843<UP,BROADCAST,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether be:d0:74:00:00:03
\tinet6 fe80::bcd0:74ff:fe00:3%ap1 prefixlen 64 scopeid 0xb
\tstatus: inactive
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=6460<TSO4,TSO6,CHANNEL_IO,PARTIAL_CSUM,ZEROINVERT_CSUM>
\tether bc:d0:74:00:00:03
\tinet6 fe80::1c6a:8d0e:7b11:2%en0 prefixlen 64 secured scopeid 0xc
\tinet 192.168.1.23 netmask 0xffffff00 broadcast 192.168.1.255
\tinet6 fd12:3456:789a:1:1c5f:22ab:99c0:1 prefixlen 64 autoconf secured
\tinet6 fd12:3456:789a:1:a5d4:e1f0:0:77 prefixlen 64 autoconf temporary
\tinet6 2001:db8:7:1:10c4:9f32:1:5 prefixlen 64 deprecated autoconf secured
\tnd6 options=201<PERFORMNUD,DAD>
\tmedia: autoselect
\tstatus: active
awdl0: flags=8843<UP,BROADCAST,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 5e:58:54:00:00:ce
\tinet6 fe80::5c58:54ff:fe00:ce%awdl0 prefixlen 64 scopeid 0xd
\tstatus: active
llw0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 5e:58:54:00:00:ce
\tinet6 fe80::5c58:54ff:fe00:ce%llw0 prefixlen 64 scopeid 0xe
\tstatus: inactive
utun0: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1380
\tinet6 fe80::7766:43fa:531d:eec3%utun0 prefixlen 64 scopeid 0xf
\tnd6 options=201<PERFORMNUD,DAD>
utun4: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1280
\toptions=6460<TSO4,TSO6,CHANNEL_IO,PARTIAL_CSUM,ZEROINVERT_CSUM>
\tinet 100.101.2.3 --> 100.101.2.3 netmask 0xffffffff
\tinet6 fe80::bed0:74ff:fe00:3%utun4 prefixlen 64 scopeid 0x13
\tinet6 fd7a:115c:a1e0::5f01:203 prefixlen 48
\tnd6 options=201<PERFORMNUD,DAD>
"""
"""A MacBook on Wi-Fi and a tailnet."""

STUDIO = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=567<RXCSUM,TXCSUM,VLAN_MTU,TSO4,TSO6,AV,CHANNEL_IO>
\tether 60:3e:5f:00:00:10
\tinet 10.20.0.15 netmask 0xffff0000 broadcast 10.20.255.255
\tmedia: autoselect (10Gbase-T <full-duplex>)
\tstatus: active
en10: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 10.30.0.15 netmask 0xffff0000 broadcast 10.30.255.255
\tstatus: active
en2: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 10.40.0.15 netmask 0xffff0000 broadcast 10.40.255.255
\tstatus: active
en5: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 192.168.7.9 netmask 0xffffff00 broadcast 192.168.7.255
\tstatus: inactive
en6: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 169.254.13.7 netmask 0xffff0000 broadcast 169.254.255.255
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 172.31.9.1 netmask 0xffffff00 broadcast 172.31.9.255
\tstatus: active
bridge100: flags=8a63<UP,BROADCAST,SMART,RUNNING,ALLMULTI,SIMPLEX,MULTICAST> mtu 1500
\tinet 192.168.64.1 netmask 0xffffff00 broadcast 192.168.64.255
\tinet6 fdc4:f46c:bb17:931b:1099:c71:e430:9090 prefixlen 64 autoconf secured
\tmember: vmenet0 flags=3<LEARNING,DISCOVER>
\tstatus: active
bridge101: flags=8a63<UP,BROADCAST,SMART,RUNNING,ALLMULTI,SIMPLEX,MULTICAST> mtu 1500
\tinet 192.168.65.1 netmask 0xffffff00 broadcast 192.168.65.255
\tmember: vmenet1 flags=3<LEARNING,DISCOVER>
\tstatus: active
vmenet0: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\tinet 192.168.66.1 netmask 0xffffff00 broadcast 192.168.66.255
utun3: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1400
\tinet 10.8.0.6 --> 10.8.0.5 netmask 0xffffffff
feth0: flags=8822<BROADCAST,SMART,SIMPLEX,MULTICAST> mtu 1500
\tinet 10.99.0.1 netmask 0xffffff00 broadcast 10.99.0.255
"""
"""A Mac Studio with wires, virtual machines, Docker Desktop and a company VPN."""


def sysctl(chip: str, memory: int) -> str:
    return f"machdep.cpu.brand_string: {chip}\nhw.memsize: {memory}\n"


def displays(*gpus: dict[str, Any]) -> str:
    return json.dumps({"SPDisplaysDataType": list(gpus)}, indent=2)


def apple_gpu(chip: str, cores: int, metal: str) -> dict[str, Any]:
    """What `system_profiler -json SPDisplaysDataType` says of an Apple GPU with a screen."""
    return {
        "_name": chip,
        "spdisplays_mtlgpufamilysupport": metal,
        "spdisplays_ndrvs": [
            {
                "_name": "Color LCD",
                "_spdisplays_pixels": "3456 x 2234",
                "spdisplays_main": "spdisplays_yes",
            }
        ],
        "spdisplays_vendor": "sppci_vendor_Apple",
        "sppci_bus": "spdisplays_builtin",
        "sppci_cores": str(cores),
        "sppci_device_type": "spdisplays_gpu",
        "sppci_model": chip,
    }
