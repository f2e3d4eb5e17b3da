# Executable of an image, which `nix build` leaves as ./result: load, push, inspect, size.
{
  pkgs,
  python,
  skopeo,
}:
image:
pkgs.writeScript "${image.imageName}-image" (
  "#!${python}/bin/python3 -I\n"
  + builtins.replaceStrings
    [
      "@image@"
      "@reference@"
      "@skopeo@"
    ]
    [
      "${image}"
      "${image.imageName}:${image.imageTag}"
      "${skopeo}/bin/skopeo"
    ]
    (builtins.readFile ./image_commands.py)
)
