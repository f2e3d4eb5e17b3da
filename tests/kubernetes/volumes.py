"""Volumes of this machine's directories, for a cluster whose nodes are this machine."""

from __future__ import annotations

from pathlib import Path

from kubectl import NAMESPACE, Kubectl


def claim(kubectl: Kubectl, name: str, directory: Path) -> None:
    """A PersistentVolumeClaim that is bound to a volume of `directory`."""
    modes, size = ["ReadWriteMany"], {"storage": "1Gi"}
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "accessModes": modes,
                "capacity": size,
                "hostPath": {"path": str(directory)},
                "storageClassName": "",
                "claimRef": {"namespace": NAMESPACE, "name": name},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {
                "accessModes": modes,
                "resources": {"requests": size},
                "storageClassName": "",
                "volumeName": name,
            },
        },
    )


def drop(kubectl: Kubectl, name: str) -> None:
    """Delete the claim and its volume."""
    kubectl("delete", f"persistentvolumeclaim/{name}", f"persistentvolume/{name}")
