"""A real Kubernetes control plane on one machine, for the tests, the demo and the benchmarks.

`binaries` finds or builds etcd, kube-apiserver and kube-controller-manager; `controlplane` starts
and stops them; `kubelet` runs pods as local processes; `reaper` sees to it that nothing survives a
crash. The controller itself never imports this package.
"""
