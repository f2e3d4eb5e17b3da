# An image as one executable file: `nix build` leaves it as ./result.
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
    (builtins.readFile ./result.py)
)
